"""Choose one token per row of logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import backend
from kernels.errors import check_device, check_shape, check_type

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
    min_ps: Tensor  # float32 [rows]; 0 is off
    uniforms: Tensor  # float64 [rows]


def sample(logits: Tensor, plan: SamplingPlan) -> Tensor:
    """The token that each row's random number falls on.

    Semantics:
        for s in range(rows):
            if plan.temperatures[s] == 0:
                out[s] = argmax(logits[s])
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

    Equal probabilities at an edge are all kept. Sums are float64.

    Shapes:
        logits   [rows, vocabulary] float32, no NaN
        returns  int64 [rows]
    """
    check_shape("logits", logits, None, None)
    check_type("logits", logits, torch.float32)
    for name, dtype in _TYPES.items():
        column = getattr(plan, name)
        check_shape(f"plan.{name}", column, logits.shape[0])
        check_type(f"plan.{name}", column, dtype)
        check_device(f"plan.{name}", column, logits.device)
    if backend.uses_triton(logits):
        from kernels.sample import triton_kernel

        return triton_kernel.sample(logits, plan)
    from kernels.sample import reference

    return reference.sample(logits, plan)
