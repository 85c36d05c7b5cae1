"""The C++ kernel: decodes, chunks of prompts and shared prefixes in one call."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from kernels import native
from kernels.paged_attention import AttentionPlan

SOURCE = Path(__file__).with_name("cpu.cpp")
_WRITER = SOURCE.parent.with_name("kv_write") / "cpu.cpp"  # of the keys that this one reads
TILE_ROWS = 48  # queries times heads that share a key: what one walk over the keys serves
_TASK_ROWS = 24
_KEYS = 64  # as in cpu.cpp

_I64, _F32, _PTR, _INT = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p, ctypes.c_int
_ARGUMENTS: list[Any] = [_PTR] * 6 + [_I64] * 9 + [_F32, _I64, _F32, _PTR, _PTR, _INT, _INT]


@dataclass(frozen=True, slots=True, eq=False)
class _Walks:
    """Launch metadata. All int64.

    An item is up to TILE_ROWS rows of one sequence; a task is a run of items that share a prefix.
    """

    items: Tensor  # [items, 5]: sequence, first row, queries, first position, shared positions
    tasks: Tensor  # [tasks + 1]: first item of each task


def is_available(device: str, dtype: torch.dtype) -> bool:
    """Whether this machine has the kernel, for tensors of this device and type."""
    return (
        device == "cpu"
        and dtype in (torch.float32, torch.bfloat16)
        and native.library(SOURCE) is not None
        and native.library(_WRITER) is not None
    )


def serves(device: str, dtype: torch.dtype, block_size: int, key_dim: int) -> bool:
    """Whether blocks of this kind are written and read by the C++ kernels."""
    paired = block_size % 2 == key_dim % 2 == 0  # how some processors multiply short numbers
    return is_available(device, dtype) and (paired or dtype is torch.float32)


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
    tokens, heads, _ = query.shape
    _, kv_heads, block_size, key_dim = key_cache.shape
    value_dim = value_cache.shape[3]
    out = query.new_empty(tokens, heads, value_dim)
    if not tokens:
        return out
    if query.stride(2) != 1:
        query = query.contiguous()
    walks = _walks(plan, heads // kv_heads)
    if sinks is not None:
        sinks = sinks.float().contiguous()
    _function()(
        query.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        plan.block_tables.data_ptr(),
        walks.items.data_ptr(),
        walks.tasks.data_ptr(),
        walks.tasks.shape[0] - 1,
        plan.block_tables.shape[1],
        heads,
        kv_heads,
        key_dim,
        value_dim,
        block_size,
        query.stride(0),
        query.stride(1),
        scale,
        window or 0,
        softcap or 0.0,
        None if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
        query.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return out


@functools.cache
def _function() -> Any:
    return native.function(SOURCE, "batten_paged_attention", _ARGUMENTS)


def _walks(plan: AttentionPlan, group: int) -> _Walks:
    key = ("cpu", group)
    if key not in plan.derived:
        items = list(_items(plan, max(1, TILE_ROWS // group)))
        tasks = _tasks(items, max(1, _TASK_ROWS // group))
        plan.derived[key] = _Walks(torch.tensor(items), torch.tensor(tasks))
    return cast(_Walks, plan.derived[key])


def _items(plan: AttentionPlan, queries: int) -> Iterator[tuple[int, int, int, int, int]]:
    prefixes = plan.shared_prefixes
    for index, blocks in zip(prefixes.order, prefixes.blocks, strict=True):
        row, count = plan.starts[index], plan.query_lens[index]
        position = plan.kv_lens[index] - count
        shared = blocks * plan.block_size
        for first in range(0, count, queries):
            yield index, row + first, min(queries, count - first), position + first, shared
            shared = position + min(first + queries, count)


def _tasks(items: list[tuple[int, int, int, int, int]], queries: int) -> list[int]:
    tasks, taken = [0], 0
    for index, (_, _, count, _, shared) in enumerate(items):
        if index and (shared < _KEYS or taken + count > queries):
            tasks.append(index)
            taken = 0
        taken += count
    return [*tasks, len(items)]
