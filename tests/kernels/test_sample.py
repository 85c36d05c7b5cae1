"""Sampling against its docstring's loop, and against the distribution it promises."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.errors import KernelArgumentError
from kernels.sample import SamplingPlan, sample


def plan(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, uniforms=None):
    if uniforms is None:
        uniforms = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return SamplingPlan(
        temperatures=torch.full((rows,), temperature),
        top_ks=torch.full((rows,), top_k),
        top_ps=torch.full((rows,), top_p, dtype=torch.float64),
        min_ps=torch.full((rows,), min_p),
        uniforms=uniforms,
    )


def loop(logits, temperature, top_k, top_p, min_p, uniform):
    p = torch.softmax(logits / temperature, 0).double().numpy()
    floor = np.float32(min_p) * np.float32(p.max())
    if top_k:
        floor = max(floor, np.sort(p)[::-1][min(top_k, len(p)) - 1])
    p = np.where(p >= floor, p, 0)
    if top_p < 1:
        ranked = np.sort(p)[::-1]
        last = int(np.argmax(np.cumsum(ranked) >= top_p * p.sum()))
        p = np.where(p >= ranked[last], p, 0)
    return int(np.argmax(np.cumsum(p) > uniform * p.sum()))


SETTINGS = [
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 10_000},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"min_p": 0.2},
    {"temperature": 2.0, "top_k": 300, "top_p": 0.9, "min_p": 0.01},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("vocabulary", [7, 700])
def test_equals_the_loop(setting, vocabulary):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(50, vocabulary, generator=generator) * 2
    sampling = plan(50, **setting)
    got = sample(logits, sampling).tolist()
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **setting}
    assert got == [
        loop(row, uniform=u, **full)
        for row, u in zip(logits, sampling.uniforms.tolist(), strict=True)
    ]


def test_greedy_rows_mix_with_sampled_ones():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    sampling = plan(4)
    sampling.temperatures[::2] = 0
    got = sample(logits, sampling)
    assert torch.equal(got[::2], logits.argmax(1)[::2])
    assert torch.equal(got[1::2], sample(logits, plan(4))[1::2])


@pytest.mark.parametrize("vocabulary", [7, 700])
def test_rows_of_every_setting_mix(vocabulary):
    settings = [*SETTINGS, {"temperature": 0.0}] * 2
    plans = [plan(1, **setting) for setting in settings]
    logits = torch.randn(len(plans), vocabulary, generator=torch.Generator().manual_seed(6)) * 2
    fields = ("temperatures", "top_ks", "top_ps", "min_ps", "uniforms")
    mixed = SamplingPlan(
        **{name: torch.cat([getattr(one, name) for one in plans]) for name in fields}
    )
    alone = [sample(row[None], one).item() for row, one in zip(logits, plans, strict=True)]
    assert sample(logits, mixed).tolist() == alone


def test_equal_probabilities_at_the_edge_are_all_kept():
    """300 equal tokens: more than the head holds, and none may be left out."""
    logits = torch.full((200, 700), -5.0)
    logits[:, 400:] = 5.0
    uniforms = (torch.arange(200, dtype=torch.float64) + 0.5) / 200
    for setting in ({"top_k": 5}, {"top_p": 0.01}, {"min_p": 0.9}):
        got = sample(logits, plan(200, uniforms=uniforms, **setting))
        assert got.min() < 405
        assert got.max() > 694


def test_a_row_does_not_depend_on_its_batch_mates():
    logits = torch.randn(6, 400, generator=torch.Generator().manual_seed(1))
    sampling = plan(6, top_p=0.7)
    together = sample(logits, sampling)
    for row in range(6):
        alone = plan(1, top_p=0.7, uniforms=sampling.uniforms[row : row + 1])
        assert sample(logits[row : row + 1], alone).item() == together[row]


def test_frequencies_follow_the_distribution():
    logits = torch.tensor([0.0, 1.0, 2.0, -torch.inf, 1.5])
    rows = 20_000
    uniforms = (torch.arange(rows, dtype=torch.float64) + 0.5) / rows
    got = sample(logits.expand(rows, 5), plan(rows, uniforms=uniforms))
    frequencies = torch.bincount(got, minlength=5) / rows
    torch.testing.assert_close(frequencies, torch.softmax(logits, 0), rtol=0, atol=1e-3)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_choose_a_kept_token(uniform):
    logits = torch.full((1, 5), -torch.inf)
    logits[0, 1:3] = 0
    uniforms = torch.tensor([uniform], dtype=torch.float64)
    assert sample(logits, plan(1, uniforms=uniforms)).item() == (2 if uniform else 1)


@pytest.mark.parametrize(
    ("argument", "logits", "changes"),
    [
        ("logits", torch.zeros(2, 5, dtype=torch.float64), {}),
        ("logits", torch.zeros(2, 5, dtype=torch.int32), {}),
        ("logits", torch.zeros(2), {}),
        ("plan.temperatures", torch.zeros(3, 5), {}),
        ("plan.temperatures", torch.zeros(2, 5, device="meta"), {}),
        ("plan.top_ks", torch.zeros(2, 5), {"top_ks": torch.zeros(2)}),
        ("plan.top_ps", torch.zeros(2, 5), {"top_ps": torch.ones(2)}),
        ("plan.min_ps", torch.zeros(2, 5), {"min_ps": torch.zeros(2).double()}),
        ("plan.uniforms", torch.zeros(2, 5), {"uniforms": torch.zeros(2, 1).double()}),
    ],
)
def test_a_wrong_argument_is_named(argument, logits, changes):
    with pytest.raises(KernelArgumentError) as error:
        sample(logits, replace(plan(2), **changes))
    assert error.value.argument == argument
