"""The Triton LoRA kernels: in Triton's interpreter against the loop in float64, or on a GPU."""

import inspect

import pytest
import torch

pytest.importorskip("triton")

from kernels.lora import LoraSegments, cpu, reference, triton_kernel
from tests.kernels.lora_cases import (
    RUNS,
    adapted,
    check_shared_as_apart,
    expected,
    make,
    same_bits,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MIXED = [(2, 1), (-1, 3), (1, 18), (5, 3), (7, 2), (-1, 1), (6, 2)]
BOUND = {torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-7}
"""One rounding; the interpreter cuts bfloat16 numbers off."""


def check(runs, dtype, width, out, affine=True):
    x, y, pool, segments = make(runs, width, out, dtype, affine=affine, device=DEVICE)
    want, inner, outer = expected(x, y, pool, segments)
    before = y.clone()
    triton_kernel.lora(x, [y], [pool], segments)
    parts = 2**-14 if dtype == torch.bfloat16 else 2**-21  # hidden products are kept in two
    allowed = BOUND[dtype] * want.abs() + 2**-21 * inner + parts * outer
    changed = adapted(segments)
    assert ((y.double() - want).abs() <= allowed)[changed].all()
    assert same_bits(y[~changed], before[~changed])


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_loop_and_leaves_base_rows(dtype, affine):
    check(MIXED, dtype, 1100, 131, affine)


@pytest.mark.full
@pytest.mark.parametrize("width", [8, 576, 2049])
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS.keys())
def test_equals_the_loop_in_all_shapes(runs, dtype, width):
    check(runs, dtype, width, 200)


def test_a_span_has_the_same_bits_alone_and_in_a_batch():
    x, y, pool, segments = make(MIXED, 1100, 40, torch.bfloat16, device=DEVICE)
    alone = y.clone()
    triton_kernel.lora(x, [y], [pool], segments)
    for start, stop, rows in segments.spans:
        one = LoraSegments.build([(0, stop - start)], [rows])
        triton_kernel.lora(x[start:stop], [alone[start:stop]], [pool], one)
    assert same_bits(alone, y)


@pytest.mark.parametrize("modules", [2, 5])
def test_modules_that_share_their_input_have_the_bits_they_have_apart(modules):
    cases = [
        make(MIXED, 90, 20 + 24 * n, torch.bfloat16, seed=n, device=DEVICE) for n in range(modules)
    ]
    check_shared_as_apart(triton_kernel.lora, cases)


def test_nothing_is_launched_for_the_base_model_alone():
    x, y, pool, segments = make(RUNS["all base"], 8, 8, torch.float32, device=DEVICE)
    before = y.clone()
    triton_kernel.lora(x, [y], [pool], segments)
    assert same_bits(y, before)


def test_all_implementations_have_one_signature():
    signatures = {inspect.signature(each.lora) for each in (triton_kernel, reference, cpu)}
    assert len(signatures) == 1
