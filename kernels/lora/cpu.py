"""The C++ kernel: all adapters of a step, in all modules that share an input, in one call."""

from __future__ import annotations

import ctypes
import functools
import struct
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
_READ = 4  # tokens whose products with a row take as long as reading it from memory


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """Launch metadata."""

    rows: array[int]  # pool rows of all spans, one after another
    tiles: array[int]  # [count, 4]: first token, tokens, first of `rows`, rows; large ones first
    most_rows: int
    work: int  # tokens * rows of all; of fewer than _READ tokens, as of so many


class _Numbers:
    """Integers of 64 bits that the kernel reads, and where they lie."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = array("q", numbers)
        self.address = _address(self._numbers)


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
    plan, numbers = _planned(segments)
    targets: list[int] = []
    columns = 0
    for y, pool in zip(outputs, pools, strict=True):
        targets += _address_of(pool), y.data_ptr(), y.stride()[0]
        columns += pool.width + pool.out
    threads = native.threads(plan.work * columns, _THREAD_WORK)
    head = x.data_ptr(), numbers.address, threads, len(pools)
    _function()(struct.pack(f"{len(targets) + 4}q", *head, *targets))


@functools.cache
def _function() -> Any:
    return native.function(SOURCE, "batten_lora", [ctypes.c_char_p])


def _address(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]


def _address_of(pool: LoraPool) -> int:
    """Of a `Pool` of cpu.cpp."""
    if "cpu" not in pool.derived:
        tensors = (pool.A, pool.B, pool.scales, pool.addresses)
        pointers = (each.data_ptr() for each in tensors)
        is_bfloat16 = pool.dtype is torch.bfloat16
        pool.derived["cpu"] = _Numbers(*pointers, pool.width, pool.out, is_bfloat16)
    return cast(_Numbers, pool.derived["cpu"]).address


def _planned(segments: LoraSegments) -> tuple[_Plan, _Numbers]:
    """With the `Plan` of cpu.cpp."""
    if "cpu" not in segments.derived:
        plan = _plan(segments)
        addresses = _address(plan.tiles), _address(plan.rows)
        segments.derived["cpu"] = plan, _Numbers(*addresses, len(plan.tiles) // 4, plan.most_rows)
    return cast(tuple[_Plan, _Numbers], segments.derived["cpu"])


def _plan(segments: LoraSegments) -> _Plan:
    rows: list[int] = []
    tiles: list[tuple[int, int, int, int]] = []
    for start, stop, span_rows in segments.spans:
        for first in range(start, stop if span_rows else start, TOKENS):
            tiles.append((first, min(TOKENS, stop - first), len(rows), len(span_rows)))
        rows += span_rows
    tiles.sort(key=lambda tile: tile[1] * tile[3], reverse=True)
    return _Plan(
        array("q", rows),
        array("q", [number for tile in tiles for number in tile]),
        max((tile[3] for tile in tiles), default=0),
        sum(max(tile[1], _READ) * tile[3] for tile in tiles),
    )
