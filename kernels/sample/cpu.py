"""The C++ kernels."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels import native
from kernels.sample import Logprobs, SamplingPlan

SOURCE = Path(__file__).with_name("cpu.cpp")
_THREAD_WORK = 1 << 18  # logits for which waking threads pays

_I64, _PTR, _INT = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
_ARGUMENTS: dict[str, list[Any]] = {
    "batten_sample": [_PTR] * 7 + [_I64] * 3 + [_INT],
    "batten_logprobs": [_PTR] * 6 + [_I64] * 4 + [_INT],
}


def is_available(device: str) -> bool:
    """Whether this machine has the kernels, for tensors of this device."""
    return device == "cpu" and native.library(SOURCE) is not None


def sample(logits: Tensor, plan: SamplingPlan) -> Tensor:
    """See `kernels.sample.sample`."""
    logits = _with_rows(logits)
    rows, vocabulary = logits.shape
    chosen = torch.empty(rows, dtype=torch.int64)
    _function("batten_sample")(
        logits.data_ptr(),
        plan.temperatures.data_ptr(),
        plan.top_ks.data_ptr(),
        plan.top_ps.data_ptr(),
        plan.min_ps.data_ptr(),
        plan.uniforms.data_ptr(),
        chosen.data_ptr(),
        rows,
        vocabulary,
        logits.stride(0),
        _threads(rows, vocabulary),
    )
    return chosen


def logprobs(logits: Tensor, rows: Sequence[int], tokens: Sequence[int], count: int) -> Logprobs:
    """See `kernels.sample.logprobs`."""
    logits = _with_rows(logits)
    places = torch.tensor([*rows, *tokens], dtype=torch.int64)
    out = Logprobs(
        chosen=torch.empty(len(rows)),
        top=torch.empty(len(rows), count),
        top_tokens=torch.empty(len(rows), count, dtype=torch.int64),
    )
    _function("batten_logprobs")(
        logits.data_ptr(),
        places.data_ptr(),
        places[len(rows) :].data_ptr(),
        out.chosen.data_ptr(),
        out.top.data_ptr(),
        out.top_tokens.data_ptr(),
        len(rows),
        logits.shape[1],
        logits.stride(0),
        count,
        _threads(len(rows), logits.shape[1]),
    )
    return out


def _with_rows(logits: Tensor) -> Tensor:
    """Each row without gaps."""
    return logits if logits.shape[1] == 1 or logits.stride(1) == 1 else logits.contiguous()


def _threads(rows: int, vocabulary: int) -> int:
    return native.threads(rows * vocabulary, _THREAD_WORK)


@functools.cache
def _function(name: str) -> Any:
    return native.function(SOURCE, name, _ARGUMENTS[name])
