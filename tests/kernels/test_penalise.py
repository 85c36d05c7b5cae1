"""Bias and penalties against the docstring's loop."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.errors import KernelArgumentError
from kernels.penalise import PenaltyPlan, penalise

FLOATS = {"biases", "times", "repetition", "frequency", "presence"}


def plan(**lists):
    fields = [field.name for field in dataclasses.fields(PenaltyPlan)]
    return PenaltyPlan(
        **{
            name: torch.tensor(
                lists.get(name, []), dtype=torch.float32 if name in FLOATS else torch.int64
            )
            for name in fields
        }
    )


def loop(logits, p):
    out = logits.double()
    for row, token, bias in zip(p.bias_rows, p.bias_tokens, p.biases, strict=True):
        out[row, token] += bias
    for i, (row, token) in enumerate(zip(p.seen_rows, p.seen_tokens, strict=True)):
        x = out[row, token]
        x = x * p.repetition[i] if x < 0 else x / p.repetition[i]
        if p.times[i]:
            x = x - (p.frequency[i] * p.times[i] + p.presence[i])
        out[row, token] = x
    return out


entry = st.tuples(st.integers(0, 3), st.integers(0, 9))
strength = st.floats(-2, 2, width=32)


@settings(max_examples=100, deadline=None)
@given(
    biases=st.lists(st.tuples(entry, strength)),
    seen=st.dictionaries(
        entry,
        st.tuples(st.integers(0, 5), st.sampled_from([0.5, 1.0, 1.7]), strength, strength),
    ),
)
def test_equals_the_loop(biases, seen):
    logits = torch.randn(4, 10, generator=torch.Generator().manual_seed(1))
    strengths = list(zip(*seen.values(), strict=True)) or [[]] * 4
    p = plan(
        bias_rows=[row for (row, _), _ in biases],
        bias_tokens=[token for (_, token), _ in biases],
        biases=[bias for _, bias in biases],
        seen_rows=[row for row, _ in seen],
        seen_tokens=[token for _, token in seen],
        **dict(zip(("times", "repetition", "frequency", "presence"), strengths, strict=True)),
    )
    expected = loop(logits, p)
    penalise(logits, p)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)


def test_an_infinite_penalty_spares_the_tokens_of_the_prompt():
    logits = torch.ones(1, 3)
    inf = torch.inf
    penalise(
        logits,
        plan(
            seen_rows=[0, 0], seen_tokens=[0, 1], times=[0, 1],
            repetition=[1, 1], frequency=[inf, inf], presence=[0, 0],
        ),
    )  # fmt: skip
    assert logits.tolist() == [[1, -inf, 1]]


def test_lists_of_different_lengths_are_named():
    with pytest.raises(KernelArgumentError, match=r"plan\.times"):
        penalise(torch.ones(1, 3), plan(seen_rows=[0], seen_tokens=[1]))
    with pytest.raises(KernelArgumentError, match="logits"):
        penalise(torch.ones(1, 3, dtype=torch.float64), plan())
