"""Decodes by the C++ kernel, chunks of prompts by the reference's matrix products."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from kernels import native
from kernels.paged_attention import AttentionPlan, reference

SOURCE = Path(__file__).with_name("cpu.cpp")
_I64, _F32, _PTR, _INT = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p, ctypes.c_int
_ARGUMENTS: list[Any] = [_PTR] * 6 + [_I64] * 7 + [_F32, _I64, _F32, _PTR, _PTR, _INT, _INT]


@dataclass(frozen=True, slots=True, eq=False)
class _Decodes:
    """The sequences of a plan that have one query. All int64."""

    tables: Tensor  # [sequences, blocks]
    lengths: Tensor  # [sequences]
    rows: Tensor  # [sequences]


def is_available(query: Tensor) -> bool:
    """Whether this machine has the kernel, for tensors of this device and type."""
    return (
        query.device.type == "cpu"
        and query.dtype in (torch.float32, torch.bfloat16)
        and native.library(SOURCE) is not None
    )


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `kernels.paged_attention.paged_attention`."""
    query = query.contiguous()
    out = query.new_empty(query.shape[0], query.shape[1], value_cache.shape[3])
    reference.attend_groups(
        reference.chunk_groups(plan, window, key_cache.shape[1]),
        query,
        key_cache,
        value_cache,
        out,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
    )
    decodes = _decodes(plan)
    if len(decodes.rows):
        _decode(decodes, query, key_cache, value_cache, out, scale, window, softcap, sinks)
    return out


def _decodes(plan: AttentionPlan) -> _Decodes:
    if "cpu" not in plan.derived:
        indices = [index for index, count in enumerate(plan.query_lens) if count == 1]
        plan.derived["cpu"] = _Decodes(
            tables=plan.block_tables[indices].contiguous(),
            lengths=torch.tensor([plan.kv_lens[index] for index in indices], dtype=torch.int64),
            rows=torch.tensor([plan.starts[index] for index in indices], dtype=torch.int64),
        )
    return cast(_Decodes, plan.derived["cpu"])


def _decode(
    decodes: _Decodes,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    out: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    library = native.library(SOURCE)
    assert library is not None
    function = library.batten_decode_attention
    function.argtypes, function.restype = _ARGUMENTS, None
    _, kv_heads, block_size, key_dim = key_cache.shape
    sinks = None if sinks is None else sinks.float().contiguous()
    function(
        query.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        decodes.tables.data_ptr(),
        decodes.lengths.data_ptr(),
        decodes.rows.data_ptr(),
        len(decodes.rows),
        decodes.tables.shape[1],
        query.shape[1],
        kv_heads,
        key_dim,
        value_cache.shape[3],
        block_size,
        scale,
        window or 0,
        softcap or 0.0,
        None if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
        int(query.dtype == torch.bfloat16),
        torch.get_num_threads(),
    )
