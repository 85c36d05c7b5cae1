"""The C++ kernel: all adapters of a step, in all modules that share an input, in one call."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from kernels import native
from kernels.lora.pool import LoraPool
from kernels.lora.segments import LoraSegments

SOURCE = Path(__file__).with_name("cpu.cpp")
TOKENS = 16  # as in cpu.cpp
_THREAD_WORK = 1 << 20  # multiplications for which waking threads pays


@dataclass(frozen=True, slots=True, eq=False)
class _Tiles:
    """Launch metadata."""

    rows: array[int]  # pool rows of all spans, one after another
    tiles: array[int]  # [count, 4]: first token, tokens, first of `rows`, rows; large ones first
    count: int
    most_rows: int
    products: int  # tokens * rows of all


def is_available(device: str, dtype: torch.dtype) -> bool:
    """Whether this machine has the kernel, for tensors of this device and type."""
    return (
        device == "cpu"
        and dtype in (torch.float32, torch.bfloat16)
        and native.library(SOURCE) is not None
    )


def lora(
    x: Tensor, outputs: Sequence[Tensor], pools: Sequence[LoraPool], segments: LoraSegments
) -> None:
    """See `kernels.lora.lora`."""
    tiles, width = _tiles(segments), pools[0].width
    targets, columns = array("q"), 0
    for y, pool in zip(outputs, pools, strict=True):
        targets.extend((_address(_descriptor(pool)), y.data_ptr(), y.stride(0)))
        columns += width + pool.out
    call = array(
        "q",
        (
            x.data_ptr(),
            width,
            _address(targets),
            len(pools),
            _address(tiles.tiles),
            tiles.count,
            _address(tiles.rows),
            tiles.most_rows,
            pools[0].dtype is torch.bfloat16,
            native.threads(tiles.products * columns, _THREAD_WORK),
        ),
    )
    _function()(_address(call))


@functools.cache
def _function() -> Any:
    return native.function(SOURCE, "batten_lora", [ctypes.c_void_p])


def _address(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]


def _descriptor(pool: LoraPool) -> array[int]:
    """`Pool` of cpu.cpp."""
    if "cpu" not in pool.derived:
        tensors = (pool.A, pool.B, pool.scales, pool.addresses)
        pool.derived["cpu"] = array("q", [*(each.data_ptr() for each in tensors), pool.out])
    return cast("array[int]", pool.derived["cpu"])


def _tiles(segments: LoraSegments) -> _Tiles:
    if "cpu" not in segments.derived:
        segments.derived["cpu"] = _plan(segments)
    return cast(_Tiles, segments.derived["cpu"])


def _plan(segments: LoraSegments) -> _Tiles:
    rows: list[int] = []
    tiles: list[tuple[int, int, int, int]] = []
    for start, stop, span_rows in segments.spans:
        for first in range(start, stop if span_rows else start, TOKENS):
            tiles.append((first, min(TOKENS, stop - first), len(rows), len(span_rows)))
        rows += span_rows
    tiles.sort(key=lambda tile: tile[1] * tile[3], reverse=True)
    return _Tiles(
        array("q", rows),
        array("q", [number for tile in tiles for number in tile]),
        len(tiles),
        max((tile[3] for tile in tiles), default=0),
        sum(tile[1] * tile[3] for tile in tiles),
    )
