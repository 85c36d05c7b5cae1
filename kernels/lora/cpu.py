"""The C++ kernel: all adapters of a step in one call."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from kernels import native
from kernels.lora import LoraSegments

SOURCE = Path(__file__).with_name("cpu.cpp")
TOKENS = 16  # most tokens of a task
_THREAD_WORK = 1 << 20  # multiplications for which waking one more thread pays

_I64, _PTR, _INT = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
_ARGUMENTS: list[Any] = [_PTR] * 7 + [_I64] * 6 + [_INT, _INT]


@dataclass(frozen=True, slots=True, eq=False)
class _Tasks:
    """Launch metadata. All int64."""

    rows: Tensor  # pool rows of all spans, one after another
    tasks: Tensor  # [tasks, 4]: first token, tokens, first of `rows`, rows
    hidden_size: int  # as in cpu.cpp
    products: int  # tokens * rows of all


def is_available(device: str, dtype: torch.dtype) -> bool:
    """Whether this machine has the kernel, for tensors of this device and type."""
    return (
        device == "cpu"
        and dtype in (torch.float32, torch.bfloat16)
        and native.library(SOURCE) is not None
    )


def lora(
    x: Tensor, y: Tensor, A: Tensor, B: Tensor, scales: Tensor, segments: LoraSegments
) -> None:
    """See `kernels.lora.lora`."""
    tasks = _tasks(segments)
    width, out = x.shape[1], y.shape[1]
    _function()(
        x.data_ptr(),
        y.data_ptr(),
        A.data_ptr(),
        B.data_ptr(),
        scales.data_ptr(),
        tasks.rows.data_ptr(),
        tasks.tasks.data_ptr(),
        len(tasks.tasks),
        tasks.hidden_size,
        width,
        out,
        x.stride(0),
        y.stride(0),
        x.dtype == torch.bfloat16,
        min(torch.get_num_threads(), 1 + tasks.products * (width + out) // _THREAD_WORK),
    )


@functools.cache
def _function() -> Any:
    library = native.library(SOURCE)
    assert library is not None
    function = library.batten_lora
    function.argtypes, function.restype = _ARGUMENTS, None
    return function


def _tasks(segments: LoraSegments) -> _Tasks:
    if "cpu" not in segments.derived:
        segments.derived["cpu"] = _plan(segments)
    return cast(_Tasks, segments.derived["cpu"])


def _plan(segments: LoraSegments) -> _Tasks:
    rows: list[int] = []
    tasks: list[tuple[int, int, int, int]] = []
    for start, stop, span_rows in segments.spans:
        for first in range(start, stop if span_rows else start, TOKENS):
            tasks.append((first, min(TOKENS, stop - first), len(rows), len(span_rows)))
        rows += span_rows
    return _Tasks(
        torch.tensor(rows, dtype=torch.int64),
        torch.tensor(tasks, dtype=torch.int64).view(-1, 4),
        max((-(-count // 4) * -(-ranks // 4) * 16 for _, count, _, ranks in tasks), default=0),
        sum(count * ranks for _, count, _, ranks in tasks),
    )
