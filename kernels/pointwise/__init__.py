"""What a layer does to each token's numbers between its products, in one pass over them.

On CPUs; elsewhere the reference's torch operations. Every rounding to the tensors' type that the
models' own code makes is made here too.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from kernels.errors import (
    KernelArgumentError,
    check_contiguous,
    check_device,
    check_shape,
    check_type,
)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root mean square normalisation.

    Semantics:
        for t in range(tokens):
            factor = 1 / sqrt(mean(float32(x[t]) ** 2) + epsilon)
            out[t] = weight * round(float32(x[t]) * factor)
        where round gives x's type

    Shapes:
        x        [..., width], contiguous
        weight   [width] of x's type
        returns  x's shape and type
    """
    if not (
        x.is_contiguous()
        and weight.shape == x.shape[-1:]
        and weight.dtype is x.dtype
        and weight.device == x.device
        and weight.is_contiguous()
    ):
        check_contiguous("x", x)
        check_shape("weight", weight, *x.shape[-1:])
        check_like("weight", weight, x)
    return _implementation(x.device.type, x.dtype).rms_norm(x, weight, epsilon)  # type: ignore[no-any-return]


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """The gated activation of an MLP.

    Semantics:
        out = round(gate / (1 + exp(-gate))) * up

    Shapes:
        gate, up  any shape, the same; contiguous, of one type
        returns   the same
    """
    if not (
        gate.shape == up.shape
        and gate.dtype is up.dtype
        and gate.device == up.device
        and gate.is_contiguous()
        and up.is_contiguous()
    ):
        check_contiguous("gate", gate)
        check_shape("up", up, *gate.shape)
        check_like("up", up, gate)
    return _implementation(gate.device.type, gate.dtype).gated_silu(gate, up)  # type: ignore[no-any-return]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, in the two halves of a head.

    Semantics:
        half = dim // 2
        for t in range(tokens), h in range(heads), d in range(dim):
            turned = -x[t, h, d + half] if d < half else x[t, h, d - half]
            out[t, h, d] = round(x[t, h, d] * cos[t, d]) + round(turned * sin[t, d])

    Shapes:
        x         [tokens, heads, dim], dim even; each head without gaps
        cos, sin  [tokens, dim] of x's type, contiguous
        returns   [tokens, heads, dim], contiguous
    """
    if not (
        x.ndim == 3
        and cos.shape == sin.shape == (x.shape[0], x.shape[2])
        and x.shape[2] % 2 == 0
        and x.dtype is cos.dtype is sin.dtype
        and x.device == cos.device == sin.device
        and x.stride(2) == 1
        and cos.is_contiguous()
        and sin.is_contiguous()
    ):
        check_shape("x", x, None, None, None)
        if x.shape[2] % 2:
            raise KernelArgumentError("x", f"{x.shape[2]} numbers a head, not even")
        for name, tensor in (("cos", cos), ("sin", sin)):
            check_shape(name, tensor, x.shape[0], x.shape[2])
            check_like(name, tensor, x)
        x = x.contiguous()
    return _implementation(x.device.type, x.dtype).rotate(x, cos, sin)  # type: ignore[no-any-return]


def check_like(argument: str, tensor: Tensor, other: Tensor) -> None:
    check_type(argument, tensor, other.dtype)
    check_device(argument, tensor, other.device)
    check_contiguous(argument, tensor)


@functools.cache
def _implementation(device: str, dtype: torch.dtype) -> ModuleType:
    """See `kernels.backend`."""
    from kernels.pointwise import cpu, reference

    return cpu if cpu.is_available(device, dtype) else reference
