"""Chunks of prompts in one Triton launch; decoding rows as `triton_decode` has them.

A tile is up to BLOCK_M rows: neighbouring queries of one sequence times the heads that share a
key. It walks its keys in blocks whose borders are multiples of BLOCK_N positions; a block that a
row can't see leaves the row's sums as they are. So a row's bits depend on its own sequence alone.
"""

from __future__ import annotations

from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.paged_attention import AttentionPlan
from kernels.paged_attention.triton_decode import decode, decode_constants
from kernels.paged_attention.triton_tile import attend

ROWS = 32  # BLOCK_M, unless more heads than this share a key
KEYS = 32  # BLOCK_N
WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]
def attention_kernel(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    tables: tl.tensor,
    tiles: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    table_width: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> None:
    """Grid [tiles, kv_heads]. `tiles` int32 [tiles, 4]: sequence, first row, queries, position."""
    tile = tiles + tl.program_id(0) * 4
    kv_head = tl.program_id(1)
    table = tables + tl.load(tile).to(tl.int64) * table_width
    first_row = tl.load(tile + 1)
    count = tl.load(tile + 2)
    first_position = tl.load(tile + 3)

    lanes = tl.arange(0, BLOCK_M)
    live = lanes < count * GROUP
    rows = (first_row + lanes // GROUP).to(tl.int64)
    heads = kv_head * GROUP + lanes % GROUP
    end = first_position + count
    positions = tl.minimum(first_position + lanes // GROUP, end - 1)
    key_dims = tl.arange(0, BLOCK_KEY)
    value_dims = tl.arange(0, BLOCK_VALUE)
    q = tl.load(
        query + (rows * query_token_stride + heads * query_head_stride)[:, None] + key_dims,
        mask=live[:, None] & (key_dims < KEY_DIM),
        other=0.0,
    )
    if HAS_SINKS:
        highest = tl.load(sinks + heads, mask=live, other=0.0).to(tl.float32)
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_VALUE], tl.float32)

    earliest = 0
    if HAS_WINDOW:
        earliest = tl.maximum(first_position - window + 1, 0)
    for start in range(earliest // BLOCK_N * BLOCK_N, end, BLOCK_N):
        highest, total, sums = attend(
            q, keys, values, table, positions, start, earliest, end, kv_head,
            highest, total, sums, scale, softcap, window,
            KV_HEADS, KEY_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_KEY, BLOCK_VALUE,
            HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip
    tl.store(
        out + ((rows * KV_HEADS * GROUP + heads) * VALUE_DIM)[:, None] + value_dims,
        (sums / total[:, None]).to(out.dtype.element_ty),
        mask=live[:, None] & (value_dims < VALUE_DIM),
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
    tokens, heads, _ = query.shape
    out = query.new_empty(tokens, heads, value_cache.shape[3])
    if not tokens:
        return out
    if query.stride(2) != 1:
        query = query.contiguous()
    sinks = None if sinks is None else sinks.contiguous()
    sizes = sizes_of(heads, key_cache.shape, value_cache.shape[3])
    decode(
        query, key_cache, value_cache, out, plan, decode_constants(sizes),
        scale=scale, window=window, softcap=softcap, sinks=sinks,
    )  # fmt: skip
    constants = prefill_constants(sizes)
    tiles = _tiles(plan, constants["BLOCK_M"] // constants["GROUP"])
    if not len(tiles):
        return out
    attention_kernel[(len(tiles), key_cache.shape[1])](
        query,
        key_cache,
        value_cache,
        query if sinks is None else sinks,
        out,
        plan.block_tables,
        tiles,
        scale,
        softcap or 1.0,
        window or 0,
        plan.block_tables.shape[1],
        query.stride(0),
        query.stride(1),
        **constants,
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        num_warps=WARPS,
    )
    return out


def sizes_of(heads: int, key_shape: tuple[int, ...], value_dim: int) -> dict[str, int]:
    """Compile-time sizes: functions of the model alone, so that no batch changes a row's path."""
    _, kv_heads, block_size, key_dim = key_shape
    group = heads // kv_heads
    return {
        "GROUP": group,
        "KV_HEADS": kv_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_N": KEYS,
        "BLOCK_KEY": max(16, triton.next_power_of_2(key_dim)),
        "BLOCK_VALUE": max(16, triton.next_power_of_2(value_dim)),
    }


def prefill_constants(sizes: dict[str, int]) -> dict[str, int]:
    """From the sizes of a model's heads."""
    return {**sizes, "BLOCK_M": max(ROWS, triton.next_power_of_2(sizes["GROUP"]))}


def _tiles(plan: AttentionPlan, queries: int) -> Tensor:
    """int32 [tiles, 4]: tiles of at most `queries` queries, of sequences that have several."""
    key = ("triton", queries)
    if key not in plan.derived:
        tiles = [
            (index, plan.starts[index] + first, min(queries, count - first), length - count + first)
            for index, (count, length) in enumerate(zip(plan.query_lens, plan.kv_lens, strict=True))
            if count > 1
            for first in range(0, count, queries)
        ]
        flat = torch.tensor(tiles, dtype=torch.int32, device=plan.slots.device)
        plan.derived[key] = flat.view(-1, 4)
    return cast(Tensor, plan.derived[key])
