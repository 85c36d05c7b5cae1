"""The LoRA op against its docstring's loop in float64."""

import pytest
import torch

from kernels.errors import KernelArgumentError
from kernels.lora import LoraSegments, lora

ROWS = [(0, 1, 2, 3), (4,), (9, 5, 12), tuple(range(16, 80)), (13, 14)]
RUNS = {
    "all base": [(-1, 5)],
    "one token": [(0, 1)],
    "base first": [(-1, 3), (0, 2), (1, 4), (2, 1)],
    "base between": [(0, 3), (-1, 4), (2, 2)],
    "unsorted": [(2, 1), (0, 2), (2, 3), (-1, 1), (1, 1), (3, 2)],
    "long prefill": [(-1, 7), (3, 300), (1, 200), (4, 1)],
    "one adapter": [(3, 40)],
}


def expected(x, y, A, B, scales, segments):
    out = y.double().clone()
    for start, stop, rows in segments.spans:
        for row in rows:
            hidden = x[start:stop].double() @ A[row].double()
            out[start:stop] += scales[row].double() * hidden[:, None] * B[row].double()
    return out


def case(runs, dtype=torch.float32, width=13, out=7):
    torch.manual_seed(0)
    segments = LoraSegments.build(runs, ROWS)
    tokens = segments.num_tokens
    x, y = torch.randn(tokens, width).to(dtype), torch.randn(tokens, out).to(dtype)
    A, B = torch.randn(80, width).to(dtype), torch.randn(80, out).to(dtype)
    return x, y, A, B, torch.rand(80) * 2, segments


@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS.keys())
def test_equals_the_loop(runs):
    x, y, A, B, scales, segments = case(runs)
    want = expected(x, y, A, B, scales, segments)
    lora(x, y, A, B, scales, segments)
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-4)


def test_bfloat16_stays_within_its_rounding():
    x, y, A, B, scales, segments = case(RUNS["unsorted"], torch.bfloat16, 64, 96)
    want = expected(x, y, A, B, scales, segments)
    lora(x, y, A, B, scales, segments)
    error = (y.double() - want).norm(dim=1) / want.norm(dim=1)
    assert error.max() < 1e-2


@pytest.mark.parametrize("runs", [RUNS["base first"], RUNS["base between"], RUNS["unsorted"]])
def test_base_rows_keep_their_bits(runs):
    x, y, A, B, scales, segments = case(runs)
    before = y.clone()
    lora(x, y, A, B, scales, segments)
    adapted = torch.zeros(len(y), dtype=torch.bool)
    for start, stop, _ in segments.spans:
        adapted[start:stop] = True
    assert torch.equal(y[~adapted], before[~adapted])
    assert not torch.isclose(y[adapted], before[adapted]).all(1).any()


def test_an_adapter_that_overflows_hurts_nobody_else():
    x, y, A, B, scales, segments = case(RUNS["base first"])
    clean = y.clone()
    lora(x, clean, A, B, scales, segments)
    A[4] = torch.finfo(torch.float32).max
    lora(x, y, A, B, scales, segments)
    assert not torch.isfinite(y[5:9]).all()
    torch.testing.assert_close(y[:5], clean[:5])
    torch.testing.assert_close(y[9:], clean[9:])


def test_minus_one_does_not_wrap_and_unknown_adapters_are_refused():
    assert LoraSegments.build([(-1, 4)], ROWS).spans == ()
    for adapter in (-2, len(ROWS)):
        with pytest.raises(KernelArgumentError) as error:
            LoraSegments.build([(adapter, 1)], ROWS)
        assert error.value.argument == "runs"
    with pytest.raises(KernelArgumentError):
        LoraSegments.build([(0, -1)], ROWS)


def test_neighbouring_runs_of_one_adapter_are_one_span():
    segments = LoraSegments.build([(1, 2), (1, 3), (-1, 1), (-1, 1), (1, 1)], ROWS)
    assert segments.spans == ((0, 5, (4,)), (7, 8, (4,)))


WRONG = {
    "x of another shape": ("x", lambda x: x[1:]),
    "x flat": ("x", lambda x: x[0]),
    "x of integers": ("x", lambda x: x.int()),
    "y of another length": ("y", lambda y: y[1:]),
    "y of another type": ("y", lambda y: y.bfloat16()),
    "y elsewhere": ("y", lambda y: y.to("meta")),
    "y transposed": ("y", lambda y: y.t().contiguous().t()),
    "A of another width": ("A", lambda A: A[:, 1:]),
    "A of another type": ("A", lambda A: A.half()),
    "A elsewhere": ("A", lambda A: A.to("meta")),
    "A with gaps": ("A", lambda A: A.repeat(2, 1)[::2]),
    "B with fewer rows": ("B", lambda B: B[1:]),
    "B of another type": ("B", lambda B: B.double()),
    "B transposed": ("B", lambda B: B.t().contiguous().t()),
    "scales too few": ("scales", lambda scales: scales[1:]),
    "scales of another type": ("scales", lambda scales: scales.bfloat16()),
    "scales with gaps": ("scales", lambda scales: scales.repeat_interleave(2)[::2]),
    "rows that the pool lacks": (
        "segments",
        lambda s: LoraSegments(s.num_tokens, ((0, 2, (80,)),)),
    ),
}


@pytest.mark.parametrize(("argument", "change"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_argument_is_named_before_anything_is_written(argument, change):
    names = ("x", "y", "A", "B", "scales", "segments")
    arguments = dict(zip(names, case(RUNS["base first"]), strict=True))
    before = arguments["y"].clone()
    given = arguments["y"]
    arguments[argument] = change(arguments[argument])
    with pytest.raises(KernelArgumentError) as error:
        lora(**arguments)
    assert error.value.argument == argument
    assert torch.equal(given, before)


def test_x_may_lie_in_any_order():
    x, y, A, B, scales, segments = case(RUNS["base first"])
    other = y.clone()
    lora(x, y, A, B, scales, segments)
    lora(x.t().contiguous().t(), other, A, B, scales, segments)
    assert torch.equal(other, y)
