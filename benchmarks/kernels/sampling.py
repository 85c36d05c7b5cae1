"""Choosing tokens, and their log-probabilities, for the vocabulary of SmolLM2."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.kernels.measure import Machine, least, report
from kernels import sample as ours
from kernels.sample import SamplingPlan, reference

VOCABULARY = 49_152
CASES = {  # temperature, top_k, top_p, min_p
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature 0.7": (0.7, 0, 1.0, 0.0),
    "top_p 0.9": (1.0, 0, 0.9, 0.0),
    "top_k 50": (1.0, 50, 1.0, 0.0),
    "min_p 0.05": (1.0, 0, 1.0, 0.05),
    "top_k 50, top_p 0.9": (0.7, 50, 0.9, 0.0),
}


def make_logits(rows: int) -> Tensor:
    """Spread like a language model's: a few dozen to a few thousand tokens hold 0.9 of a row."""
    spreads = torch.linspace(2.0, 4.0, rows)[:, None]
    return (torch.randn(rows, VOCABULARY) * spreads).bfloat16().float()


def sampling(machine: Machine, rounds: int) -> None:
    """The floor reads the logits once."""
    torch.manual_seed(0)
    for rows in (1, 12, 64):
        logits = make_logits(rows)
        floor = machine.floor(logits.nbytes, 0)
        for name, (temperature, top_k, top_p, min_p) in CASES.items():
            plan = SamplingPlan(
                temperatures=torch.full((rows,), temperature),
                top_ks=torch.full((rows,), top_k),
                top_ps=torch.full((rows,), top_p, dtype=torch.float64),
                min_ps=torch.full((rows,), min_p),
                uniforms=torch.rand(rows, dtype=torch.float64),
            )
            runs = {
                "ours": lambda logits=logits, plan=plan: ours.sample(logits, plan),
                "reference": lambda logits=logits, plan=plan: reference.sample(logits, plan),
            }
            times = dict(zip(runs, least(rounds, list(runs.values())), strict=True))
            report(f"{name}, {rows} rows", floor, times)
        arguments = (logits, range(rows), [0] * rows, 5)
        runs = {
            "ours": lambda arguments=arguments: ours.logprobs(*arguments),
            "reference": lambda arguments=arguments: reference.logprobs(*arguments),
        }
        times = dict(zip(runs, least(rounds, list(runs.values())), strict=True))
        report(f"5 log-probabilities, {rows} rows", floor, times)
