"""Temperature and filters keep exactly what Hugging Face's own processors keep."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kernels.sample import SamplingPlan, sample

VOCABULARY = 700
UNIFORMS = (torch.arange(400, dtype=torch.float64) + 0.5) / 400


def processors(options: dict[str, float]) -> LogitsProcessorList:
    made = {
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
    }
    return LogitsProcessorList([made[name](value) for name, value in options.items()])


def ours(logits: torch.Tensor, options: dict[str, float]) -> list[int]:
    count = len(UNIFORMS)
    plan = SamplingPlan(
        temperatures=torch.full((count,), options.get("temperature", 1.0)),
        top_ks=torch.full((count,), int(options.get("top_k", 0))),
        top_ps=torch.full((count,), options.get("top_p", 1.0), dtype=torch.float64),
        min_ps=torch.full((count,), options.get("min_p", 0.0)),
        uniforms=UNIFORMS,
    )
    return sample(logits.expand(count, -1), plan).tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 1},
        {"top_k": 50},
        {"top_k": 500},
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"top_p": 0.01},
        {"min_p": 0.05},
        {"temperature": 0.8, "top_k": 30, "top_p": 0.7},
        {"temperature": 1.5, "top_p": 0.95},
    ],
    ids=str,
)
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_every_random_number_falls_on_hugging_faces_distribution(
    options: dict[str, float], spread: float
) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(1, VOCABULARY, generator=generator) * spread
    warped = processors(options)(torch.zeros(1, 1, dtype=torch.int64), logits.clone())
    probabilities = torch.softmax(warped[0].double(), 0)
    cumulative = torch.cumsum(probabilities, 0)
    edges = (cumulative[:, None] - UNIFORMS).abs().amin(0)
    want = torch.searchsorted(cumulative, UNIFORMS, right=True)
    got = torch.tensor(ours(logits, options))
    certain = edges > 1e-5  # nearer to an edge, float32 decides
    assert certain.sum() > 0.9 * len(UNIFORMS)
    assert torch.equal(got[certain], want[certain])
    assert bool((probabilities[got] > 0).all()), "a token that the filters drop"
