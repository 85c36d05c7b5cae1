"""The LoRA op: its definition against its docstring's loop in float64, and its arguments."""

import pytest
import torch

from kernels.errors import KernelArgumentError
from kernels.lora import LoraPool, LoraSegments, lora, reference
from tests.kernels.lora_cases import POOL, ROWS, RUNS, adapted, expected, make, same_bits

EPSILON = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
FEW = [(-1, 3), (0, 2), (1, 4), (4, 1)]


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("dtype", EPSILON, ids=str)
@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS.keys())
def test_the_definition_is_the_loop_with_one_rounding(runs, dtype, affine):
    x, y, pool, segments = make(runs, 65, 31, dtype, affine=affine)
    want, inner, outer = expected(x, y, pool, segments)
    before = y.clone()
    reference.lora(x, [y], [pool], segments)
    changed = adapted(segments)
    allowed = EPSILON[dtype] * want.abs() + 16 * 2.0**-24 * (inner + outer)
    assert ((y.double() - want).abs() <= allowed)[changed].all()
    assert same_bits(y[~changed], before[~changed])


def test_neighbouring_rows_need_no_gathering():
    x, y, pool, segments = make([(1, 5)], 64, 40, torch.float32)
    (rows,) = (rows for _, _, rows in segments.spans)
    there = tuple(range(200, 200 + len(rows)))
    for tensor in (pool.A, pool.B, pool.scales):
        tensor[list(there)] = tensor[list(rows)].clone()
    pool.put(there[0], *pool.affine(rows[0]))
    moved = y.clone()
    reference.lora(x, [y], [pool], segments)
    reference.lora(x, [moved], [pool], LoraSegments(5, ((0, 5, there),)))
    assert torch.equal(moved, y)


def test_an_adapter_that_overflows_hurts_nobody_else():
    x, y, pool, segments = make(FEW, 13, 7, torch.float32)
    clean = y.clone()
    lora(x, [clean], [pool], segments)
    pool.A[list(ROWS[1])] = torch.finfo(torch.float32).max
    lora(x, [y], [pool], segments)
    assert not torch.isfinite(y[5:9]).all()
    assert torch.equal(y[3:5], clean[3:5])
    assert torch.equal(y[9:], clean[9:])


def test_minus_one_does_not_wrap_and_unknown_adapters_are_refused():
    assert LoraSegments.build([(-1, 4)], ROWS).spans == ()
    for adapter in (-2, len(ROWS)):
        with pytest.raises(KernelArgumentError) as error:
            LoraSegments.build([(adapter, 1)], ROWS)
        assert error.value.argument == "runs"
    with pytest.raises(KernelArgumentError):
        LoraSegments.build([(0, -1)], ROWS)


def test_neighbouring_runs_of_one_adapter_are_one_span():
    segments = LoraSegments.build([(1, 2), (1, 3), (-1, 1), (-1, 1), (1, 1)], [(), (4,)])
    assert segments.spans == ((0, 5, (4,)), (7, 8, (4,)))


WRONG = {
    "x of another shape": ("x", lambda x: x[1:]),
    "x of another width": ("x", lambda x: x[:, 1:]),
    "x flat": ("x", lambda x: x[0]),
    "x of integers": ("x", lambda x: x.int()),
    "x elsewhere": ("x", lambda x: x.to("meta")),
    "y of another length": ("outputs[1]", lambda y: y[1:]),
    "y of another width": ("outputs[1]", lambda y: y[:, 1:].contiguous()),
    "y of another type": ("outputs[1]", lambda y: y.bfloat16()),
    "y elsewhere": ("outputs[1]", lambda y: y.to("meta")),
    "y transposed": ("outputs[1]", lambda y: y.t().contiguous().t()),
    "a pool too few": ("outputs", lambda pools: pools[1:]),
    "rows that the pool lacks": (
        "segments",
        lambda s: LoraSegments(s.num_tokens, ((0, 2, (POOL,)),)),
    ),
}


@pytest.mark.parametrize(("argument", "change"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_argument_is_named_before_anything_is_written(argument, change):
    x, y, pool, segments = make(FEW, 13, 7, torch.float32)
    other = y.clone()
    arguments = {"x": x, "outputs[1]": other, "outputs": [pool, pool], "segments": segments}
    arguments[argument] = change(arguments[argument])
    x, other, pools, segments = arguments.values()
    before = y.clone()
    with pytest.raises(KernelArgumentError) as error:
        lora(x, [y, other], pools, segments)
    assert error.value.argument == argument
    assert same_bits(y, before)


WRONG_POOLS = {
    "A flat": ("A", lambda A: A[0]),
    "A of integers": ("A", lambda A: A.int()),
    "A with gaps": ("A", lambda A: A.repeat(2, 1)[::2]),
    "B with fewer rows": ("B", lambda B: B[1:]),
    "B of another type": ("B", lambda B: B.double()),
    "B elsewhere": ("B", lambda B: B.to("meta")),
    "B transposed": ("B", lambda B: B.t().contiguous().t()),
    "scales too few": ("scales", lambda scales: scales[1:]),
    "scales of another type": ("scales", lambda scales: scales.bfloat16()),
    "scales elsewhere": ("scales", lambda scales: scales.to("meta")),
    "scales with gaps": ("scales", lambda scales: scales.repeat_interleave(2)[::2]),
}


@pytest.mark.parametrize(("argument", "change"), WRONG_POOLS.values(), ids=WRONG_POOLS.keys())
def test_a_pool_of_wrong_tensors_is_refused(argument, change):
    arguments = {"A": torch.ones(6, 4), "B": torch.ones(6, 3), "scales": torch.ones(6)}
    arguments[argument] = change(arguments[argument])
    with pytest.raises(KernelArgumentError) as error:
        LoraPool(**arguments)
    assert error.value.argument == argument


WRONG_AFFINES = {
    "a row that there is not": ("row", {"row": 6}),
    "a negative row": ("row", {"row": -1}),
    "gain too short": ("gain", {"gain": torch.ones(2)}),
    "gain of another type": ("gain", {"gain": torch.ones(3).bfloat16()}),
    "shift elsewhere": ("shift", {"shift": torch.ones(3, device="meta")}),
    "shift with gaps": ("shift", {"shift": torch.ones(6)[::2]}),
}


@pytest.mark.parametrize(("argument", "change"), WRONG_AFFINES.values(), ids=WRONG_AFFINES.keys())
def test_a_wrong_gain_or_shift_is_refused(argument, change):
    pool = LoraPool(torch.ones(6, 4), torch.ones(6, 3), torch.ones(6))
    with pytest.raises(KernelArgumentError) as error:
        pool.put(**({"row": 2, "gain": torch.ones(3), "shift": torch.ones(3)} | change))
    assert error.value.argument == argument
    assert pool.affine(2) == (None, None)
    assert not pool.addresses.any()


def test_a_dropped_gain_and_shift_count_no_more():
    x, y, pool, segments = make(FEW, 13, 7, torch.float32)
    plain = make(FEW, 13, 7, torch.float32, affine=False)
    for rows in ROWS[:-1]:
        pool.drop(rows[0])
        pool.drop(rows[0])
    assert not pool.addresses.any()
    lora(x, [y], [pool], segments)
    lora(plain[0], [plain[1]], [plain[2]], segments)
    assert same_bits(y, plain[1])


def test_x_may_lie_in_any_order():
    x, y, pool, segments = make(FEW, 13, 7, torch.float32)
    other = y.clone()
    lora(x, [y], [pool], segments)
    lora(x.t().contiguous().t(), [other], [pool], segments)
    assert same_bits(other, y)
