"""The C++ LoRA against float64 in awkward shapes, and a row's bits alone and in batches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import native
from kernels.lora import LoraSegments, cpu, lora
from tests.kernels.lora_cases import (
    ROWS,
    RUNS,
    adapted,
    check_shared_as_apart,
    expected,
    make,
    same_bits,
)

pytestmark = pytest.mark.skipif(native.library(cpu.SOURCE) is None, reason="no C++ compiler")

EPSILON = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("dtype", EPSILON, ids=str)
@pytest.mark.parametrize("shape", [(64, 96), (13, 7), (1, 1), (576, 192), (33, 65), (100, 331)])
@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS.keys())
def test_equals_float64_to_the_last_rounding(runs, shape, dtype, affine):
    x, y, pool, segments = make(runs, *shape, dtype, affine=affine)
    want, inner, outer = expected(x, y, pool, segments)
    before = y.clone()
    cpu.lora(x, [y], [pool], segments)
    changed = adapted(segments)
    allowed = EPSILON[dtype] * want.abs() + 4 * 2.0**-24 * (inner + outer)
    assert ((y.double() - want).abs() <= allowed)[changed].all()
    assert same_bits(y[~changed], before[~changed])


@pytest.mark.parametrize("dtype", EPSILON, ids=str)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(threads, dtype):
    x, y, pool, segments = make(RUNS["mixed ranks"], 576, 100, dtype)
    alone = y.clone()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        cpu.lora(x, [y], [pool], segments)
        for start, stop, rows in segments.spans:
            for token in range(start, stop):
                row = slice(token, token + 1)
                cpu.lora(x[row], [alone[row]], [pool], LoraSegments(1, ((0, 1, rows),)))
    finally:
        torch.set_num_threads(before)
    assert same_bits(alone, y)


@pytest.mark.parametrize("dtype", EPSILON, ids=str)
def test_modules_that_share_their_input_have_the_bits_they_have_apart(dtype):
    cases = [make(RUNS["mixed ranks"], 90, 20 + 24 * n, dtype, seed=n) for n in range(5)]
    check_shared_as_apart(cpu.lora, cases)


def test_the_place_of_an_adapter_in_the_pool_is_free():
    x, y, pool, segments = make([(5, 9)], 64, 40, torch.bfloat16)
    (rows,) = (rows for _, _, rows in segments.spans)
    moved = y.clone()
    cpu.lora(x, [y], [pool], segments)
    elsewhere = tuple(range(100, 100 + len(rows)))
    for tensor in (pool.A, pool.B, pool.scales):
        tensor[list(elsewhere)] = tensor[list(rows)].clone()
    pool.put(elsewhere[0], *pool.affine(rows[0]))
    cpu.lora(x, [moved], [pool], LoraSegments(9, ((0, 9, elsewhere),)))
    assert same_bits(moved, y)


@pytest.mark.parametrize("dtype", EPSILON, ids=str)
@pytest.mark.parametrize("out", [31, 40, 96])
def test_columns_of_a_wider_result_are_updated_in_place(out, dtype):
    x, y, pool, segments = make(RUNS["mixed ranks"], 64, out, dtype)
    wide = torch.full((len(y), out + 60), torch.nan, dtype=dtype)
    around = wide.clone()
    wide[:, 30 : 30 + out] = y
    lora(x, [wide[:, 30 : 30 + out]], [pool], segments)
    cpu.lora(x, [y], [pool], segments)
    assert same_bits(wide[:, 30 : 30 + out].contiguous(), y)
    wide[:, 30 : 30 + out] = torch.nan
    assert same_bits(wide, around)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 7), st.integers(0, 40)), max_size=12))
def test_tasks_cover_every_adapted_token_once(runs):
    segments = LoraSegments.build(runs, ROWS)
    planned = cpu._plan(segments)
    tiles = torch.tensor(planned.tiles, dtype=torch.int64).view(-1, 4).tolist()
    seen = {}
    for first, count, at, ranks in tiles:
        assert 1 <= count <= cpu.TOKENS
        assert 1 <= ranks <= planned.most_rows
        for token in range(first, first + count):
            assert token not in seen
            seen[token] = tuple(planned.rows[at : at + ranks])
    assert seen == {
        token: rows
        for start, stop, rows in segments.spans
        for token in range(start, stop if rows else start)
    }
    assert planned.work == sum(max(count, cpu._READ) * ranks for _, count, _, ranks in tiles)


@pytest.mark.parametrize(("tokens", "work"), [(1, 32), (4, 32), (5, 40), (21, 168)])
def test_few_tokens_are_as_much_work_as_reading_their_rows(tokens, work):
    segments = LoraSegments.build([(-1, 3), (0, tokens)], [range(8)])
    assert cpu._plan(segments).work == work
