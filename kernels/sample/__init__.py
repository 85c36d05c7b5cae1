"""Choose one token per row of logits, and say how likely it was."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from kernels import backend
from kernels.errors import (
    KernelArgumentError,
    check_contiguous,
    check_device,
    check_shape,
    check_type,
)

_TYPES = {  # of the fields of a plan
    "temperatures": torch.float32,
    "top_ks": torch.int64,
    "top_ps": torch.float64,
    "min_ps": torch.float32,
    "uniforms": torch.float64,
}


@dataclass(frozen=True, slots=True, eq=False)
class SamplingPlan:
    """How each row is sampled.

    `uniforms` are in [0, 1), one per row; the caller makes them a function of the request's
    seed and the position only, so that a token doesn't depend on its batch mates.
    """

    temperatures: Tensor  # float32 [rows]; 0 is greedy
    top_ks: Tensor  # int64 [rows]; 0 is off
    top_ps: Tensor  # float64 [rows]; 1 is off
    min_ps: Tensor  # float32 [rows], at most 1; 0 is off
    uniforms: Tensor  # float64 [rows]


@dataclass(frozen=True, slots=True, eq=False)
class Logprobs:
    """Log-probabilities of some rows."""

    chosen: Tensor  # float32 [rows]: of the token that each row chose
    top: Tensor  # float32 [rows, count]: the largest, in descending order
    top_tokens: Tensor  # int64 [rows, count]: whose they are


def sample(logits: Tensor, plan: SamplingPlan) -> Tensor:
    """The token that each row's random number falls on.

    Semantics:
        for s in range(rows):
            if not isfinite(max(logits[s])):  # NaN where one is
                out[s] = -1
                continue
            if plan.temperatures[s] == 0:
                out[s] = argmax(logits[s])  # the first
                continue
            p = softmax(logits[s] / plan.temperatures[s])
            floor = plan.min_ps[s] * max(p)
            if plan.top_ks[s]:
                floor = max(floor, nth_largest(p, plan.top_ks[s]))
            p = [x if x >= floor else 0 for x in p]
            if plan.top_ps[s] < 1:
                nucleus = shortest prefix of sorted(p, reverse=True) with
                          sum(prefix) >= plan.top_ps[s] * sum(p)
                p = [x if x >= nucleus[-1] else 0 for x in p]
            out[s] = first v with sum(p[: v + 1]) > plan.uniforms[s] * sum(p)

    Equal probabilities at an edge are all kept. p is float32, its sums are float64. So two
    implementations choose alike but where a random number lies within 1e-5 of an edge between
    tokens, or a filter's edge within 1e-5 of a probability.

    Shapes:
        logits   [rows, vocabulary] float32
        returns  int64 [rows]
    """
    if not _fits(logits, plan):
        _refuse(logits, plan)
    return _implementation(logits.device.type).sample(logits, plan)  # type: ignore[no-any-return]


def logprobs(logits: Tensor, rows: Sequence[int], tokens: Sequence[int], count: int) -> Logprobs:
    """Log-probabilities of a token of each of `rows`, and the `count` largest of that row.

    Semantics:
        for i, row in enumerate(rows):
            p = log_softmax(logits[row])
            chosen[i] = p[tokens[i]]
            top_tokens[i] = argsort(p, descending=True)[:count]  # equal ones in any order
            top[i] = p[top_tokens[i]]

    All are NaN in a row whose largest logit is not finite.

    Shapes:
        logits  [all rows, vocabulary] float32
    """
    check_shape("logits", logits, None, None)
    check_type("logits", logits, torch.float32)
    height, vocabulary = logits.shape
    if len(tokens) != len(rows):
        raise KernelArgumentError("tokens", f"{len(tokens)} of {len(rows)} rows")
    if rows and not 0 <= min(rows) <= max(rows) < height:
        raise KernelArgumentError("rows", f"{min(rows)} to {max(rows)} of {height}")
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
        raise KernelArgumentError("tokens", f"{min(tokens)} to {max(tokens)} of {vocabulary}")
    if not 0 <= count <= vocabulary:
        raise KernelArgumentError("count", f"{count} of {vocabulary}")
    return _implementation(logits.device.type).logprobs(logits, rows, tokens, count)  # type: ignore[no-any-return]


def _fits(logits: Tensor, plan: SamplingPlan) -> bool:
    """Whether all is as `sample` says."""
    return (
        logits.ndim == 2
        and logits.shape[1] > 0
        and logits.dtype is torch.float32
        and all(
            column.shape == logits.shape[:1]
            and column.dtype is dtype
            and column.device == logits.device
            and column.is_contiguous()
            for column, dtype in ((getattr(plan, name), dtype) for name, dtype in _TYPES.items())
        )
    )


def _refuse(logits: Tensor, plan: SamplingPlan) -> None:
    """Raise KernelArgumentError for the first argument that doesn't fit."""
    check_shape("logits", logits, None, None)
    check_type("logits", logits, torch.float32)
    if not logits.shape[1]:
        raise KernelArgumentError("logits", f"shape {list(logits.shape)} has no tokens")
    for name, dtype in _TYPES.items():
        column = getattr(plan, name)
        check_shape(f"plan.{name}", column, logits.shape[0])
        check_type(f"plan.{name}", column, dtype)
        check_device(f"plan.{name}", column, logits.device)
        check_contiguous(f"plan.{name}", column)


@functools.cache
def _implementation(device: str) -> ModuleType:
    """See `kernels.backend`."""
    if backend.triton_serves(device):
        from kernels.sample import triton_kernel

        return triton_kernel
    from kernels.sample import cpu, reference

    return cpu if cpu.is_available(device) else reference
