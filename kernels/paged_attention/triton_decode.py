"""Decoding rows in two Triton launches: splits of the keys, then their merge.

A tile is one split of the keys and the rows that see it in the same blocks (`splits`), times the
heads that share a key. It leaves the row's highest score, the sum of its weights and the weighted
sum of values, which the merge joins in the order of positions. All of this is a function of the
row's own keys: its bits are the same alone, in a batch, and with a shared prefix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.paged_attention import AttentionPlan
from kernels.paged_attention.splits import SPLIT, plan_splits
from kernels.paged_attention.triton_tile import attend

ROWS = 32  # BLOCK_M, unless more heads than this share a key


@dataclass(frozen=True, slots=True, eq=False)
class _Launch:
    """All int32, on the device. Lanes of a tile that no row takes hold -1."""

    tiles: Tensor  # [tiles, 2]: sequence whose block table is read, split
    lanes: Tensor  # [tiles, queries, 3]: row in the pack, its position, where its sums go
    rows: Tensor  # [decoding rows, 3]: row in the pack, first of its sums, how many
    partials: int


@triton.jit  # type: ignore[untyped-decorator]
def split_kernel(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    partial_out: tl.tensor,
    partial_weights: tl.tensor,
    tables: tl.tensor,
    tiles: tl.tensor,
    tile_lanes: tl.tensor,
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
    QUERIES: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
) -> None:
    """Grid [tiles, kv_heads].

    partial_out      float32 [partials, heads, value_dim]
    partial_weights  float32 [partials, heads, 2]: highest score, sum of weights
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    table = tables + tl.load(tiles + tile * 2).to(tl.int64) * table_width
    start = tl.load(tiles + tile * 2 + 1) * SPLIT
    lanes = tl.arange(0, BLOCK_M)
    taken = lanes < QUERIES * GROUP
    lane = tile_lanes + (tile * QUERIES + lanes // GROUP) * 3
    rows = tl.load(lane, mask=taken, other=-1).to(tl.int64)
    live = rows >= 0
    positions = tl.load(lane + 1, mask=live, other=0)
    places = tl.load(lane + 2, mask=live, other=0).to(tl.int64)
    heads = kv_head * GROUP + lanes % GROUP
    key_dims = tl.arange(0, BLOCK_KEY)
    value_dims = tl.arange(0, BLOCK_VALUE)
    q = tl.load(
        query + (rows * query_token_stride + heads * query_head_stride)[:, None] + key_dims,
        mask=live[:, None] & (key_dims < KEY_DIM),
        other=0.0,
    )
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_VALUE], tl.float32)
    end = tl.minimum(start + SPLIT, tl.max(tl.where(live, positions, 0), 0) + 1)
    earliest = start
    if HAS_WINDOW:
        first = tl.where(live, tl.maximum(positions - window + 1, 0), end)
        earliest = tl.maximum(start, tl.min(first, 0))
    for at in range(start, end, BLOCK_N):
        highest, total, sums = attend(
            q, keys, values, table, positions, at, earliest, end, kv_head,
            highest, total, sums, scale, softcap, window,
            KV_HEADS, KEY_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_KEY, BLOCK_VALUE,
            HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip
    to = places * KV_HEADS * GROUP + heads
    tl.store(
        partial_out + (to * VALUE_DIM)[:, None] + value_dims,
        sums,
        mask=live[:, None] & (value_dims < VALUE_DIM),
    )
    tl.store(partial_weights + to * 2, highest, mask=live)
    tl.store(partial_weights + to * 2 + 1, total, mask=live)


@triton.jit  # type: ignore[untyped-decorator]
def merge_kernel(
    partial_out: tl.tensor,
    partial_weights: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    merged_rows: tl.tensor,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> None:
    """Grid [decoding rows, heads]."""
    row = merged_rows + tl.program_id(0) * 3
    head = tl.program_id(1)
    first = tl.load(row + 1).to(tl.int64)
    value_dims = tl.arange(0, BLOCK_VALUE)
    if HAS_SINKS:
        highest = tl.load(sinks + head).to(tl.float32)
        total = highest * 0.0 + 1.0
    else:
        highest = tl.load(partial_weights + (first * HEADS + head) * 2)
        total = highest * 0.0
    sums = tl.zeros([BLOCK_VALUE], tl.float32)
    for step in range(tl.load(row + 2)):
        place = (first + step) * HEADS + head
        score = tl.load(partial_weights + place * 2)
        raised = tl.maximum(highest, score)
        before, now = tl.exp(highest - raised), tl.exp(score - raised)
        part = tl.load(
            partial_out + place * VALUE_DIM + value_dims, mask=value_dims < VALUE_DIM, other=0.0
        )
        total = total * before + tl.load(partial_weights + place * 2 + 1) * now
        sums = sums * before + part * now
        highest = raised
    to = (tl.load(row).to(tl.int64) * HEADS + head) * VALUE_DIM
    tl.store(
        out + to + value_dims, (sums / total).to(out.dtype.element_ty), mask=value_dims < VALUE_DIM
    )


def decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    out: Tensor,
    plan: AttentionPlan,
    constants: dict[str, int],
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Fill `out` for the plan's sequences of one query."""
    launch = _launch(plan, constants["QUERIES"], window)
    if launch is None:
        return
    heads, value_dim = out.shape[1:]
    sums = query.new_empty(launch.partials, heads, value_dim, dtype=torch.float32)
    weights = query.new_empty(launch.partials, heads, 2, dtype=torch.float32)
    split_kernel[(len(launch.tiles), key_cache.shape[1])](
        query,
        key_cache,
        value_cache,
        sums,
        weights,
        plan.block_tables,
        launch.tiles,
        launch.lanes,
        scale,
        softcap or 1.0,
        window or 0,
        plan.block_tables.shape[1],
        query.stride(0),
        query.stride(1),
        **constants,
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        num_warps=warps_of(constants),
    )
    merge_kernel[(len(launch.rows), heads)](
        sums,
        weights,
        weights if sinks is None else sinks,
        out,
        launch.rows,
        HEADS=heads,
        VALUE_DIM=value_dim,
        BLOCK_VALUE=constants["BLOCK_VALUE"],
        HAS_SINKS=sinks is not None,
        num_warps=1,
    )


def decode_constants(sizes: dict[str, int]) -> dict[str, int]:
    """From the sizes of a model's heads."""
    rows = max(ROWS, triton.next_power_of_2(sizes["GROUP"]))
    queries = rows // sizes["GROUP"]
    return {**sizes, "BLOCK_M": rows, "QUERIES": queries, "SPLIT": SPLIT}


def warps_of(constants: dict[str, int]) -> int:
    """Enough that the sums of a tile stay in registers."""
    return 4 if constants["BLOCK_VALUE"] <= 128 else 8


def _launch(plan: AttentionPlan, queries: int, window: int | None) -> _Launch | None:
    key = ("triton decode", queries, window)
    if key not in plan.derived:
        plan.derived[key] = _plan(plan, queries, window)
    return cast("_Launch | None", plan.derived[key])


def _plan(plan: AttentionPlan, queries: int, window: int | None) -> _Launch | None:
    decoding = [index for index, count in enumerate(plan.query_lens) if count == 1]
    if not decoding:
        return None
    device = plan.slots.device
    sequences = torch.tensor(decoding)
    lengths = torch.tensor(plan.kv_lens)[sequences]
    pack = torch.tensor(plan.starts)[sequences]
    tables = plan.block_tables.cpu()[sequences].numpy()
    splits = plan_splits(lengths.numpy(), tables, plan.block_size, queries, window)
    rows, places = torch.from_numpy(splits.rows), torch.from_numpy(splits.places)
    offsets = torch.from_numpy(splits.offsets)
    lanes = torch.stack([pack[rows], lengths[rows] - 1, places], 2).masked_fill(
        rows[..., None] < 0, -1
    )
    tiles = torch.stack(
        [sequences[torch.from_numpy(splits.sources)], torch.from_numpy(splits.splits)], 1
    )
    merged = torch.stack([pack, offsets[:-1], offsets.diff()], 1)
    return _Launch(
        tiles.to(device, torch.int32),
        lanes.to(device, torch.int32),
        merged.to(device, torch.int32),
        partials=int(offsets[-1]),
    )
