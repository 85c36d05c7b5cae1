"""The Triton LoRA kernels: in Triton's interpreter against the loop in float64, or on a GPU."""

import inspect

import pytest
import torch

pytest.importorskip("triton")

from kernels.lora import LoraSegments, LoraTarget, reference, triton_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = [(0, 1, 2, 3), (4,), (9, 5, 12), tuple(range(16, 80)), tuple(range(299, 43, -1)), ()]
RUNS = {
    "one token": [(1, 1)],
    "mixed": [(2, 1), (-1, 3), (0, 18), (2, 3), (5, 2), (-1, 1), (3, 2)],
    "every rank": [(4, 2), (3, 17), (-1, 2), (0, 1), (1, 1)],
}


def case(runs, dtype, width, out):
    generator = torch.Generator().manual_seed(0)

    def random(*size):
        return torch.randn(*size, generator=generator).to(dtype)

    segments = LoraSegments.build(runs, ROWS)
    x, y = random(segments.num_tokens, width), random(segments.num_tokens, out)
    A, B = random(300, width) / width**0.5, random(300, out)
    unused = sorted(set(range(300)) - segments.rows)
    A[unused], B[unused] = torch.nan, torch.inf
    return x, y, A, B, torch.rand(300, generator=generator) * 2, segments


def expected(x, y, A, B, scales, segments):
    """(y, the magnitudes that the products with A and with B sum up)"""
    out = y.double()
    inner, outer = torch.zeros_like(out), torch.zeros_like(out)
    for start, stop, rows in segments.spans:
        own = list(rows)
        hidden = x[start:stop].double() @ A[own].double().t() * scales[own].double()
        out[start:stop] += hidden @ B[own].double()
        sizes = x[start:stop].double().abs() @ A[own].double().abs().t() * scales[own].double()
        inner[start:stop] += sizes @ B[own].double().abs()
        outer[start:stop] += hidden.abs() @ B[own].double().abs()
    return out, inner, outer


def run(x, y, A, B, scales, segments):
    got = y.to(DEVICE, copy=True)
    inputs = [tensor.to(DEVICE) for tensor in (A, B, scales)]
    triton_kernel.lora(x.to(DEVICE), got, *inputs, segments)
    return got.cpu()


def check(runs, dtype, width, out):
    arguments = case(runs, dtype, width, out)
    (want, inner, outer), got, y = expected(*arguments), run(*arguments), arguments[1]
    bound = {torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-7}[
        dtype
    ]  # interpreted: truncated
    parts = 2**-14 if dtype == torch.bfloat16 else 2**-21  # hidden products are kept in two
    allowed = bound * want.abs() + 2**-21 * inner + parts * outer
    assert ((got.double() - want).abs() <= allowed).all()
    adapted = torch.zeros(len(y), dtype=torch.bool)
    for start, stop, rows in arguments[5].spans:
        adapted[start:stop] = bool(rows)
    assert torch.equal(got[~adapted], y[~adapted])
    assert not torch.equal(got[adapted], y[adapted])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_loop_and_leaves_base_rows(dtype):
    check(RUNS["mixed"], dtype, 1100, 131)


@pytest.mark.full
@pytest.mark.parametrize("width", [8, 576, 2049])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS.keys())
def test_equals_the_loop_in_all_shapes(runs, dtype, width):
    check(runs, dtype, width, 200)


def test_a_span_has_the_same_bits_alone_and_in_a_batch():
    x, y, A, B, scales, segments = case(RUNS["mixed"], torch.bfloat16, 1100, 40)
    together = run(x, y, A, B, scales, segments)
    for start, stop, rows in segments.spans:
        one = LoraSegments.build([(0, stop - start)], [rows])
        assert torch.equal(
            run(x[start:stop], y[start:stop], A, B, scales, one), together[start:stop]
        )


@pytest.mark.parametrize("modules", [2, 5])
def test_modules_that_share_their_input_have_the_bits_they_have_apart(modules):
    cases = [case(RUNS["mixed"], torch.bfloat16, 90, 20 + 24 * each) for each in range(modules)]
    x, segments = cases[0][0], cases[0][5]
    apart = [run(x, *each[1:5], segments) for each in cases]
    targets = [
        LoraTarget(y.to(DEVICE, copy=True), A.to(DEVICE), B.to(DEVICE), scales.to(DEVICE))
        for _, y, A, B, scales, _ in cases
    ]
    triton_kernel.lora_shared(x.to(DEVICE), targets, segments)
    for target, y in zip(targets, apart, strict=True):
        assert torch.equal(target.y.cpu(), y)


def test_nothing_is_launched_for_the_base_model_alone():
    x, y, A, B, scales, segments = case([(-1, 3)], torch.float32, 8, 8)
    assert torch.equal(run(x, y, A, B, scales, segments), y)


def test_both_implementations_have_one_signature():
    assert inspect.signature(triton_kernel.lora) == inspect.signature(reference.lora)
