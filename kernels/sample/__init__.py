"""Choose one token per row of logits."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels import backend
from kernels.errors import KernelArgumentError, check_shape


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
    if logits.dtype.itemsize != 4:
        raise KernelArgumentError("logits", f"{logits.dtype}, expected float32")
    for name in ("temperatures", "top_ks", "top_ps", "min_ps", "uniforms"):
        check_shape(f"plan.{name}", getattr(plan, name), logits.shape[0])
    if backend.uses_triton(logits):
        from kernels.sample import triton_kernel

        return triton_kernel.sample(logits, plan)
    from kernels.sample import reference

    return reference.sample(logits, plan)
