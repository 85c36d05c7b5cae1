"""Norms, gated activations and rotary embeddings: C++ against float64 and against torch's bits."""

import pytest
import torch

from kernels import native, pointwise
from kernels.errors import KernelArgumentError
from kernels.pointwise import cpu, reference

needs_compiler = pytest.mark.skipif(native.library(cpu.SOURCE) is None, reason="no C++ compiler")
SIZES = [(1, 1), (1, 64), (7, 576), (3, 100), (70, 33)]
HEADS = [(1, 1, 2), (5, 3, 64), (9, 2, 80), (4, 1, 12), (3, 4, 256)]


def random(*shape, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


@needs_compiler
@pytest.mark.parametrize("size", SIZES)
def test_bfloat16_has_the_bits_of_the_reference(size):
    x, y = random(*size, dtype=torch.bfloat16, scale=4), random(*size, dtype=torch.bfloat16)
    weight = random(size[1], dtype=torch.bfloat16)
    norms = [op.rms_norm(x, weight, 1e-5) for op in (cpu, reference)]
    epsilon = 2.0**-7  # a sum in another order may round one number the other way
    torch.testing.assert_close(*norms, rtol=epsilon, atol=0)
    assert (norms[0] != norms[1]).float().mean() < 0.01
    assert torch.equal(cpu.gated_silu(x, y), reference.gated_silu(x, y))


@needs_compiler
@pytest.mark.parametrize("size", SIZES)
def test_float32_is_right_to_a_few_roundings(size):
    x, y, weight = random(*size, scale=4), random(*size), random(size[1])
    wide = x.double()
    norm = weight.double() * wide / (wide.pow(2).mean(1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(
        cpu.rms_norm(x, weight, 1e-5).double(), norm, rtol=4 * 2.0**-23, atol=0
    )
    activated = wide / (1 + (-wide).exp()) * y.double()
    torch.testing.assert_close(cpu.gated_silu(x, y).double(), activated, rtol=4 * 2.0**-23, atol=0)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", HEADS)
def test_rotations_have_the_bits_of_the_reference(size, dtype):
    tokens, heads, dim = size
    x = random(heads, tokens, dim, dtype=dtype).transpose(0, 1)
    cos, sin = random(tokens, dim, dtype=dtype), random(tokens, dim + 1, dtype=dtype)[:, :dim]
    sin = sin.contiguous()
    assert torch.equal(cpu.rotate(x, cos, sin), reference.rotate(x, cos, sin))


@needs_compiler
def test_extreme_numbers():
    x = torch.tensor([[-torch.inf, -200, -88, -1e-30, 0.0, 1e-30, 88, 200, torch.inf, torch.nan]])
    found = cpu.gated_silu(x, torch.ones_like(x))
    expected = reference.gated_silu(x, torch.ones_like(x))
    torch.testing.assert_close(found[:, 1:], expected[:, 1:], rtol=1e-6, atol=1e-36, equal_nan=True)
    broken = cpu.rms_norm(torch.cat([x, torch.ones_like(x)]), torch.ones(10), 1e-5)
    assert broken[0].isnan().any()
    torch.testing.assert_close(broken[1], torch.full((10,), 1.0), rtol=1e-4, atol=0)


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(threads):
    x, up = random(300, 577, dtype=torch.bfloat16), random(300, 577, dtype=torch.bfloat16)
    weight = random(577, dtype=torch.bfloat16)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        norm, gated = cpu.rms_norm(x, weight, 1e-5), cpu.gated_silu(x, up)
    finally:
        torch.set_num_threads(before)
    for row in (0, 150, 299):
        one = slice(row, row + 1)
        assert torch.equal(cpu.rms_norm(x[one], weight, 1e-5), norm[one])
        assert torch.equal(cpu.gated_silu(x[one], up[one]), gated[one])


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("x", lambda: pointwise.rms_norm(random(4, 6).t(), random(4), 1e-5)),
        ("weight", lambda: pointwise.rms_norm(random(4, 6), random(4), 1e-5)),
        ("weight", lambda: pointwise.rms_norm(random(4, 6), random(6).double(), 1e-5)),
        ("gate", lambda: pointwise.gated_silu(random(4, 6).t(), random(6, 4))),
        ("up", lambda: pointwise.gated_silu(random(4, 6), random(4, 5))),
        ("up", lambda: pointwise.gated_silu(random(4, 6), random(4, 6).bfloat16())),
        ("x", lambda: pointwise.rotate(random(4, 6), random(4, 6), random(4, 6))),
        ("x", lambda: pointwise.rotate(random(4, 1, 5), random(4, 5), random(4, 5))),
        ("cos", lambda: pointwise.rotate(random(4, 1, 6), random(3, 6), random(4, 6))),
        ("sin", lambda: pointwise.rotate(random(4, 1, 6), random(4, 6), random(6, 4).t())),
        ("sin", lambda: pointwise.rotate(random(4, 1, 6), random(4, 6), random(4, 6).half())),
    ],
)
def test_a_wrong_argument_is_named(argument, call):
    with pytest.raises(KernelArgumentError) as error:
        call()
    assert error.value.argument == argument
