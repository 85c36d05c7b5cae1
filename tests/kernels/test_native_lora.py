"""The C++ LoRA against float64 in awkward shapes, and a row's bits alone and in batches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import native
from kernels.lora import LoraSegments, cpu, lora, reference

pytestmark = pytest.mark.skipif(native.library(cpu.SOURCE) is None, reason="no C++ compiler")

EPSILON = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
POOL = 400
RANKS = (1, 8, 64, 256, 3, 16)
ROWS = []
_rows = torch.randperm(POOL, generator=torch.Generator().manual_seed(1)).tolist()
for _rank in RANKS:
    ROWS.append(tuple(_rows.pop() for _ in range(_rank)))
RUNS = {
    "one token": [(0, 1)],
    "mixed ranks": [(-1, 3), (0, 2), (1, 5), (2, 1), (3, 4), (4, 7), (5, 33), (-1, 1)],
    "one adapter": [(1, 40)],
    "as many adapters as tokens": [(index, 1) for index in range(6)],
    "base between": [(5, 3), (-1, 4), (4, 2)],
}


def make(runs, width, out, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    segments = LoraSegments.build(runs, ROWS)
    x, y = random(segments.num_tokens, width), random(segments.num_tokens, out)
    A, B = random(POOL, width), random(POOL, out)
    scales = torch.rand(POOL, generator=generator) * 2
    unused = sorted(set(range(POOL)) - segments.rows)
    A[unused] = torch.nan
    B[unused] = torch.nan
    scales[unused] = torch.nan
    return x, y, A, B, scales, segments


def expected(x, y, A, B, scales, segments):
    """float64, and the sum of the absolute values of all that is summed."""
    out, sizes = y.double().clone(), y.double().abs()
    for start, stop, rows in segments.spans:
        rows = list(rows)
        x_rows, a, b = x[start:stop].double(), A[rows].double(), B[rows].double()
        out[start:stop] += (x_rows @ a.t() * scales[rows].double()) @ b
        sizes[start:stop] += (x_rows.abs() @ a.abs().t() * scales[rows].double()) @ b.abs()
    return out, sizes


@pytest.mark.parametrize("dtype", EPSILON, ids=str)
@pytest.mark.parametrize("shape", [(64, 96), (13, 7), (1, 1), (576, 192), (33, 65), (100, 31)])
@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS.keys())
def test_equals_float64_to_the_last_rounding(runs, shape, dtype):
    x, y, A, B, scales, segments = make(runs, *shape, dtype)
    want, sizes = expected(x, y, A, B, scales, segments)
    before = y.clone()
    cpu.lora(x, y, A, B, scales, segments)
    allowed = EPSILON[dtype] * want.abs() + 4 * 2.0**-24 * sizes
    assert ((y.double() - want).abs() <= allowed).all()
    adapted = torch.zeros(len(y), dtype=torch.bool)
    for start, stop, _ in segments.spans:
        adapted[start:stop] = True
    assert torch.equal(y[~adapted], before[~adapted])


@pytest.mark.parametrize("dtype", EPSILON, ids=str)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(threads, dtype):
    runs = RUNS["mixed ranks"]
    x, y, A, B, scales, segments = make(runs, 576, 100, dtype)
    alone = y.clone()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        cpu.lora(x, y, A, B, scales, segments)
        for start, stop, rows in segments.spans:
            for token in range(start, stop):
                cpu.lora(
                    x[token : token + 1],
                    alone[token : token + 1],
                    A,
                    B,
                    scales,
                    LoraSegments(1, ((0, 1, rows),)),
                )
    finally:
        torch.set_num_threads(before)
    assert torch.equal(alone, y)


def test_the_place_of_an_adapter_in_the_pool_is_free():
    x, y, A, B, scales, segments = make([(5, 9)], 64, 40, torch.bfloat16)
    (rows,) = (rows for _, _, rows in segments.spans)
    moved = y.clone()
    cpu.lora(x, y, A, B, scales, segments)
    elsewhere = tuple(range(100, 100 + len(rows)))
    for pool in (A, B, scales):
        pool[list(elsewhere)] = pool[list(rows)].clone()
    cpu.lora(x, moved, A, B, scales, LoraSegments(9, ((0, 9, elsewhere),)))
    assert torch.equal(moved, y)


def test_columns_of_a_wider_result_are_updated_in_place():
    x, y, A, B, scales, segments = make(RUNS["mixed ranks"], 64, 40, torch.float32)
    wide = torch.full((len(y), 100), 7.0)
    wide[:, 30:70] = y
    lora(x, wide[:, 30:70], A, B, scales, segments)
    cpu.lora(x, y, A, B, scales, segments)
    assert torch.equal(wide[:, 30:70], y)
    assert (wide[:, :30] == 7).all()
    assert (wide[:, 70:] == 7).all()


def test_it_agrees_with_the_reference():
    x, y, A, B, scales, segments = make(RUNS["mixed ranks"], 64, 40, torch.float32)
    other = y.clone()
    cpu.lora(x, y, A, B, scales, segments)
    reference.lora(x, other, A, B, scales, segments)
    torch.testing.assert_close(y, other, rtol=1e-4, atol=1e-3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 5), st.integers(0, 40)), max_size=12))
def test_tasks_cover_every_adapted_token_once(runs):
    segments = LoraSegments.build(runs, ROWS)
    tasks = cpu._plan(segments)
    seen = {}
    for first, count, at, ranks in tasks.tasks.tolist():
        assert 1 <= count <= cpu.TOKENS
        for token in range(first, first + count):
            assert token not in seen
            seen[token] = tuple(tasks.rows[at : at + ranks].tolist())
    assert seen == {
        token: rows for start, stop, rows in segments.spans for token in range(start, stop)
    }
    assert tasks.products == sum(map(len, seen.values()))
