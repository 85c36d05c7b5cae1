"""Low-rank updates in Triton launches over the step's real tiles.

Shrink: a program multiplies up to BLOCK_M tokens of one span with up to RANKS of its adapter's
rows, over one chunk of the input width, into a workspace of its own; modules that share their
input share the launch. Expand, once a module: a program sums the chunks in order, scales, and
adds the product with the same rows of B, then applies the adapter's gain and shift. Tiles and
chunks never depend on other spans and nothing is added atomically, so a token's bits depend on its
own span alone. Base tokens are in no tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.lora.pool import LoraPool
from kernels.lora.segments import LoraSegments
from kernels.triton_dot import dot

TOKENS = 16  # BLOCK_M
RANKS = 16
MODULES = 3  # most that share a shrink
CHUNK = 1024  # input columns of one shrink program
COLUMNS = 128  # output columns of one expand program


@dataclass(frozen=True, slots=True, eq=False)
class _Tiles:
    """All int32."""

    shrink: Tensor  # [shrink tiles, 2]: first token, tokens
    rows: Tensor  # [shrink tiles, RANKS]: pool rows, padded with -1
    expand: Tensor  # [expand tiles, 4]: first token, tokens, first shrink tile, shrink tiles


@triton.jit  # type: ignore[untyped-decorator]
def _rows_of(
    A: tl.tensor,
    rows: tl.tensor,
    at: tl.tensor,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """[BLOCK_K, RANKS]"""
    mask = (rows[None, :] >= 0) & (at[:, None] < WIDTH)
    return tl.load(A + rows[None, :] * WIDTH + at[:, None], mask=mask, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def shrink_kernel(
    x: tl.tensor,
    A: tl.tensor,
    A_second: tl.tensor,
    A_third: tl.tensor,
    hidden: tl.tensor,
    tiles: tl.tensor,
    tile_rows: tl.tensor,
    x_stride: tl.tensor,
    MODULES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Grid [shrink tiles, chunks]. `hidden` float32 [MODULES, chunks, shrink tiles, BLOCK_M,
    RANKS]: x is read once for up to three modules that share it."""
    tile = tl.program_id(0)
    chunk = tl.program_id(1)
    lanes = tl.arange(0, BLOCK_M)
    ranks = tl.arange(0, RANKS)
    tokens = (tl.load(tiles + tile * 2) + lanes).to(tl.int64)
    live = lanes < tl.load(tiles + tile * 2 + 1)
    rows = tl.load(tile_rows + tile * RANKS + ranks).to(tl.int64)
    first = tl.zeros([BLOCK_M, RANKS], tl.float32)
    second = tl.zeros([BLOCK_M, RANKS], tl.float32)
    third = tl.zeros([BLOCK_M, RANKS], tl.float32)
    for start in range(chunk * CHUNK, min(chunk * CHUNK + CHUNK, WIDTH), BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        inputs = tl.load(
            x + tokens[:, None] * x_stride + at[None, :],
            mask=live[:, None] & (at[None, :] < WIDTH),
            other=0.0,
        )
        first += dot(inputs, _rows_of(A, rows, at, WIDTH))
        if MODULES > 1:
            second += dot(inputs, _rows_of(A_second, rows, at, WIDTH))
        if MODULES > 2:
            third += dot(inputs, _rows_of(A_third, rows, at, WIDTH))
    size = tl.num_programs(0).to(tl.int64) * BLOCK_M * RANKS
    to = chunk * size + tile * BLOCK_M * RANKS + lanes[:, None] * RANKS + ranks[None, :]
    tl.store(hidden + to, first)
    if MODULES > 1:
        tl.store(hidden + tl.num_programs(1) * size + to, second)
    if MODULES > 2:
        tl.store(hidden + 2 * tl.num_programs(1) * size + to, third)


@triton.jit  # type: ignore[untyped-decorator]
def _vector(
    address: tl.tensor, columns: tl.tensor, OUT: tl.constexpr, default: tl.constexpr
) -> tl.tensor:
    """float32 [1, BLOCK_N] from a number that is an address, or 0 for `default`."""
    mask = (columns < OUT) & (address != 0)
    return tl.load(address.to(tl.pointer_type(tl.float32)) + columns, mask, default)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def expand_kernel(
    hidden: tl.tensor,
    B: tl.tensor,
    scales: tl.tensor,
    addresses: tl.tensor,
    y: tl.tensor,
    tiles: tl.tensor,
    tile_rows: tl.tensor,
    y_stride: tl.tensor,
    chunk_stride: tl.tensor,
    OUT: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Grid [expand tiles, blocks of output columns]."""
    tile = tiles + tl.program_id(0) * 4
    lanes = tl.arange(0, BLOCK_M)
    ranks = tl.arange(0, RANKS)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = (tl.load(tile) + lanes).to(tl.int64)
    live = lanes < tl.load(tile + 1)
    first = tl.load(tile + 2)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(tl.load(tile + 3)):
        index = (first + step).to(tl.int64)
        rows = tl.load(tile_rows + index * RANKS + ranks).to(tl.int64)
        own = rows >= 0
        at = index * BLOCK_M * RANKS + lanes[:, None] * RANKS + ranks[None, :]
        products = tl.load(hidden + at)
        for chunk in tl.static_range(1, CHUNKS):
            products += tl.load(hidden + at + chunk * chunk_stride)
        products *= tl.load(scales + rows, mask=own, other=0.0)[None, :]
        weights = tl.load(
            B + rows[:, None] * OUT + columns[None, :],
            mask=own[:, None] & (columns[None, :] < OUT),
            other=0.0,
        )
        high = products.to(weights.dtype)
        sums += dot(high, weights)
        if weights.dtype != tl.float32:  # what rounding the products has left over
            sums += dot((products - high.to(tl.float32)).to(weights.dtype), weights)
    target = y + tokens[:, None] * y_stride + columns[None, :]
    mask = live[:, None] & (columns[None, :] < OUT)
    total = tl.load(target, mask=mask, other=0.0).to(tl.float32) + sums
    at = addresses + tl.load(tile_rows + first * RANKS).to(tl.int64) * 2
    total = total * _vector(tl.load(at), columns, OUT, 1.0)
    total = total + _vector(tl.load(at + 1), columns, OUT, 0.0)
    tl.store(target, total.to(y.dtype.element_ty), mask=mask)


def lora(
    x: Tensor, outputs: Sequence[Tensor], pools: Sequence[LoraPool], segments: LoraSegments
) -> None:
    """See `kernels.lora.lora`."""
    tiles = _tiles(segments, x.device)
    if not len(tiles.shrink):
        return
    for first in range(0, len(pools), MODULES):
        _launch(x, outputs[first : first + MODULES], pools[first : first + MODULES], tiles)


def _launch(x: Tensor, outputs: Sequence[Tensor], pools: Sequence[LoraPool], tiles: _Tiles) -> None:
    width = x.shape[1]
    chunks = triton.cdiv(width, CHUNK)
    hidden = torch.empty(
        len(pools), chunks, len(tiles.shrink), TOKENS, RANKS, dtype=torch.float32, device=x.device
    )
    matrices = [pool.A for pool in pools]
    matrices += matrices[:1] * (MODULES - len(matrices))
    shrink_kernel[(len(tiles.shrink), chunks)](
        x,
        *matrices,
        hidden,
        tiles.shrink,
        tiles.rows,
        x.stride(0),
        **shrink_constants(width, len(pools)),
        num_warps=2,
    )
    for y, pool, products in zip(outputs, pools, hidden, strict=True):
        expand_kernel[(len(tiles.expand), triton.cdiv(pool.out, COLUMNS))](
            products,
            pool.B,
            pool.scales,
            pool.addresses,
            y,
            tiles.expand,
            tiles.rows,
            y.stride(0),
            hidden.stride(1),
            **expand_constants(width, pool.out),
            num_warps=4,
        )


def shrink_constants(width: int, modules: int = 1) -> dict[str, int]:
    sizes = {"BLOCK_M": TOKENS, "RANKS": RANKS, "BLOCK_K": 64, "CHUNK": CHUNK}
    return {"MODULES": modules, "WIDTH": width, **sizes}


def expand_constants(width: int, out: int) -> dict[str, int]:
    chunks = triton.cdiv(width, CHUNK)
    return {"OUT": out, "CHUNKS": chunks, "BLOCK_M": TOKENS, "RANKS": RANKS, "BLOCK_N": COLUMNS}


def _tiles(segments: LoraSegments, device: torch.device) -> _Tiles:
    if "triton" not in segments.derived:
        segments.derived["triton"] = _plan(segments, device)
    return cast(_Tiles, segments.derived["triton"])


def _plan(segments: LoraSegments, device: torch.device) -> _Tiles:
    shrink: list[tuple[int, int]] = []
    rows: list[list[int]] = []
    expand: list[tuple[int, int, int, int]] = []
    for start, stop, span_rows in segments.spans:
        for first in range(start, stop if span_rows else start, TOKENS):
            count = min(TOKENS, stop - first)
            expand.append((first, count, len(shrink), triton.cdiv(len(span_rows), RANKS)))
            for rank in range(0, len(span_rows), RANKS):
                part = span_rows[rank : rank + RANKS]
                rows.append([*part, *([-1] * (RANKS - len(part)))])
                shrink.append((first, count))
    return _Tiles(
        torch.tensor(shrink, dtype=torch.int32, device=device).view(-1, 2),
        torch.tensor(rows, dtype=torch.int32, device=device).view(-1, RANKS),
        torch.tensor(expand, dtype=torch.int32, device=device).view(-1, 4),
    )
