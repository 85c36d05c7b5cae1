"""The C++ kernels."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels import native

SOURCE = Path(__file__).with_name("cpu.cpp")
_THREAD_WORK = 1 << 15  # numbers for which waking threads pays

_I64, _F32, _PTR, _INT = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p, ctypes.c_int
_ARGUMENTS: dict[str, list[Any]] = {
    "batten_rms_norm": [_PTR] * 3 + [_I64, _I64, _F32, _INT, _INT],
    "batten_gated_silu": [_PTR] * 3 + [_I64, _INT, _INT],
    "batten_rotate": [_PTR] * 4 + [_I64] * 5 + [_INT, _INT],
}


def is_available(device: str, dtype: torch.dtype) -> bool:
    """Whether this machine has the kernels, for tensors of this device and type."""
    return (
        device == "cpu"
        and dtype in (torch.float32, torch.bfloat16)
        and native.library(SOURCE) is not None
    )


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """See `kernels.pointwise.rms_norm`."""
    out, width = torch.empty_like(x), x.shape[-1]
    _function("batten_rms_norm")(
        x.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        x.numel() // max(width, 1),
        width,
        epsilon,
        x.dtype == torch.bfloat16,
        _threads(x),
    )
    return out


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """See `kernels.pointwise.gated_silu`."""
    out = torch.empty_like(gate)
    _function("batten_gated_silu")(
        gate.data_ptr(),
        up.data_ptr(),
        out.data_ptr(),
        gate.numel(),
        gate.dtype == torch.bfloat16,
        _threads(gate),
    )
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `kernels.pointwise.rotate`."""
    tokens, heads, dim = x.shape
    out = x.new_empty(tokens, heads, dim)
    _function("batten_rotate")(
        x.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        out.data_ptr(),
        tokens,
        heads,
        dim,
        x.stride(0),
        x.stride(1),
        x.dtype == torch.bfloat16,
        _threads(x),
    )
    return out


def _threads(x: Tensor) -> int:
    return native.threads(x.numel(), _THREAD_WORK)


@functools.cache
def _function(name: str) -> Any:
    return native.function(SOURCE, name, _ARGUMENTS[name])
