"""Bias and penalise logits before a token is chosen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.errors import KernelArgumentError, check_shape


@dataclass(frozen=True, slots=True, eq=False)
class PenaltyPlan:
    """What changes in which rows. Rows that need nothing are in none of the lists.

    Example: row 2 adds 1.5 to token 7; row 0 has seen tokens 4 (in its prompt) and 9 (chosen
    twice).

        bias_rows [2]      bias_tokens [7]     biases [1.5]
        seen_rows [0, 0]   seen_tokens [4, 9]  times [0, 2]

    A (row, token) is seen at most once, and biased any number of times. The penalties have one
    entry for each entry of `seen_rows`.
    """

    bias_rows: Tensor  # int64 [biases]
    bias_tokens: Tensor  # int64 [biases]
    biases: Tensor  # float32 [biases]
    seen_rows: Tensor  # int64 [seen]
    seen_tokens: Tensor  # int64 [seen]
    times: Tensor  # float32 [seen]: how often it was chosen; 0 for tokens of the prompt alone
    repetition: Tensor  # float32 [seen]; 1 is off
    frequency: Tensor  # float32 [seen]; 0 is off
    presence: Tensor  # float32 [seen]; 0 is off


def penalise(logits: Tensor, plan: PenaltyPlan) -> None:
    """Change `logits` in place: bias, then repetition, frequency and presence penalty.

    Semantics:
        for row, token, bias in zip(plan.bias_rows, plan.bias_tokens, plan.biases):
            logits[row, token] += bias
        for i, (row, token) in enumerate(zip(plan.seen_rows, plan.seen_tokens)):
            x = logits[row, token]
            x = x * plan.repetition[i] if x < 0 else x / plan.repetition[i]
            if plan.times[i]:
                x -= plan.frequency[i] * plan.times[i] + plan.presence[i]
            logits[row, token] = x

    The repetition penalty is that of CTRL (Keskar et al., 2019) as Hugging Face has it, the
    others are OpenAI's.

    Shapes:
        logits  [rows, vocabulary] float32
    """
    if logits.dtype != torch.float32:
        raise KernelArgumentError("logits", f"{logits.dtype}, expected float32")
    check_shape("logits", logits, None, None)
    for name in ("bias_tokens", "biases"):
        check_shape(f"plan.{name}", getattr(plan, name), len(plan.bias_rows))
    for name in ("seen_tokens", "times", "repetition", "frequency", "presence"):
        check_shape(f"plan.{name}", getattr(plan, name), len(plan.seen_rows))
    from kernels.penalise import reference

    reference.penalise(logits, plan)
