"""The C++ kernel. Keys lie in their blocks as `cpu.cpp` says, for `paged_attention` to read."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels import native
from kernels.paged_attention import AttentionPlan

SOURCE = Path(__file__).with_name("cpu.cpp")
_THREAD_WORK = 1 << 15  # numbers for which waking threads pays

_I64, _PTR, _INT = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
_ARGUMENTS: list[Any] = [_PTR] * 5 + [_I64] * 9 + [_INT, _INT]


def kv_write(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan
) -> None:
    """See `kernels.kv_write.kv_write`."""
    key, value = _dense_rows(key), _dense_rows(value)
    tokens, kv_heads, key_dim = key.shape
    _function()(
        key.data_ptr(),
        value.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        plan.slots.data_ptr(),
        tokens,
        kv_heads,
        plan.block_size,
        key_dim,
        key.stride(0),
        key.stride(1),
        value.shape[2],
        value.stride(0),
        value.stride(1),
        key.dtype == torch.bfloat16,
        native.threads(key.numel() + value.numel(), _THREAD_WORK),
    )


def _dense_rows(rows: Tensor) -> Tensor:
    return rows if rows.stride(2) == 1 else rows.contiguous()


@functools.cache
def _function() -> Any:
    return native.function(SOURCE, "batten_kv_write", _ARGUMENTS)
