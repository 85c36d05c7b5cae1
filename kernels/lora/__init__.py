"""Low-rank updates of packed tokens, each token with its own adapter, from one rank pool."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels import backend
from kernels.errors import KernelArgumentError, check_device, check_rows, check_shape, check_type
from kernels.lora.pool import LoraPool
from kernels.lora.segments import LoraSegments

__all__ = ["LoraPool", "LoraSegments", "lora"]


def lora(
    x: Tensor, outputs: Sequence[Tensor], pools: Sequence[LoraPool], segments: LoraSegments
) -> None:
    """Change the outputs of modules that share the input `x` by every token's adapter, in place.

    Semantics:
        for y, pool in zip(outputs, pools):
            for start, stop, rows in segments.spans:
                gain, shift = pool.affine(rows[0])
                for t in range(start, stop):
                    for row in rows:
                        y[t] += pool.scales[row] * dot(pool.A[row], x[t]) * pool.B[row]
                    y[t] = y[t] * (1 if gain is None else gain) + (0 if shift is None else shift)

    Shapes:
        x            [tokens, in]
        outputs[i]   [tokens, out of pools[i]]    x's type, as the pools; each row without gaps

    All of it is float32, and each number of an output is rounded once. Tokens outside the spans
    keep their bits. What other adapters' rows hold, infinities included, has no effect on a token,
    nor has any other token. Raises KernelArgumentError before anything is changed.
    """
    if not _fits(x, outputs, pools, segments):
        _refuse(x, outputs, pools, segments)
        x = x.contiguous()
    if segments.spans and pools:
        _implementation(pools[0].device_type, pools[0].dtype)(x, outputs, pools, segments)


def _fits(
    x: Tensor, outputs: Sequence[Tensor], pools: Sequence[LoraPool], segments: LoraSegments
) -> bool:
    """Whether all is as `lora` says, and `x` contiguous."""
    if len(outputs) != len(pools) or not x.is_contiguous():
        return False
    inputs, dtype, device = x.shape, x.dtype, x.device
    tokens, last_row = segments.num_tokens, segments.last_row
    for y, pool in zip(outputs, pools, strict=True):
        if not (
            inputs == (tokens, pool.width)
            and y.shape == (tokens, pool.out)
            and y.dtype is dtype is pool.dtype
            and y.device == device == pool.device
            and y.is_contiguous()
            and last_row < pool.num_rows
        ):
            return False
    return True


def _refuse(
    x: Tensor, outputs: Sequence[Tensor], pools: Sequence[LoraPool], segments: LoraSegments
) -> None:
    """Raise KernelArgumentError for the first argument that doesn't fit, if one doesn't."""
    if len(outputs) != len(pools):
        raise KernelArgumentError("outputs", f"{len(outputs)} for {len(pools)} pools")
    for index, (y, pool) in enumerate(zip(outputs, pools, strict=True)):
        check_shape("x", x, segments.num_tokens, pool.width)
        check_type("x", x, pool.dtype)
        check_device("x", x, pool.device)
        name = f"outputs[{index}]"
        check_shape(name, y, segments.num_tokens, pool.out)
        check_type(name, y, pool.dtype)
        check_device(name, y, pool.device)
        check_rows(name, y)
        if segments.last_row >= pool.num_rows:
            message = f"row {segments.last_row} of {pool.num_rows}"
            raise KernelArgumentError("segments", message)


@functools.cache
def _implementation(device: str, dtype: torch.dtype) -> Callable[..., None]:
    """See `kernels.backend`."""
    if backend.triton_serves(device):
        from kernels.lora import triton_kernel

        return triton_kernel.lora
    from kernels.lora import cpu, reference

    return cpu.lora if cpu.is_available(device, dtype) else reference.lora
