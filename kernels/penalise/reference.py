"""The definition in torch: a handful of launches, however many rows there are."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.penalise import PenaltyPlan


def penalise(logits: Tensor, plan: PenaltyPlan) -> None:
    """See `kernels.penalise.penalise`."""
    if len(plan.biases):
        places = (plan.bias_rows, plan.bias_tokens)
        logits.index_put_(places, plan.biases, accumulate=True)
    if len(plan.times):
        scores = logits[plan.seen_rows, plan.seen_tokens]
        scores = torch.where(scores < 0, scores * plan.repetition, scores / plan.repetition)
        penalties = plan.frequency * plan.times + plan.presence
        penalties = penalties.masked_fill(plan.times == 0, 0)
        logits[plan.seen_rows, plan.seen_tokens] = scores - penalties
