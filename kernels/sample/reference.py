"""The definition in torch, without sorting the vocabulary where its head decides."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.sample import SamplingPlan

HEAD = 256  # largest probabilities looked at first


def sample(logits: Tensor, plan: SamplingPlan) -> Tensor:
    """See `kernels.sample.sample`."""
    greedy = plan.temperatures == 0
    if bool(greedy.all()):
        return logits.argmax(1)
    divisors = plan.temperatures.masked_fill(greedy, 1)
    probabilities = torch.softmax(logits / divisors[:, None], 1)
    filtered = probabilities.masked_fill_(probabilities < _floors(probabilities, plan)[:, None], 0)
    cumulative = torch.cumsum(filtered, 1, dtype=torch.float64)
    total = cumulative[:, -1]
    below_total = torch.nextafter(total, torch.zeros_like(total))
    targets = torch.minimum(plan.uniforms * total, below_total)
    chosen = torch.searchsorted(cumulative, targets[:, None], right=True)[:, 0]
    return torch.where(greedy, logits.argmax(1), chosen)


def _floors(probabilities: Tensor, plan: SamplingPlan) -> Tensor:
    """float32 [rows]: the smallest probability that each row keeps."""
    floors = plan.min_ps * probabilities.amax(1)
    filtering = (plan.top_ks > 0) | (plan.top_ps < 1)
    rows = filtering.nonzero()[:, 0]
    width = min(HEAD, probabilities.shape[1])
    while rows.numel():
        found, decided = _ranked_floors(probabilities[rows], floors[rows], rows, plan, width)
        floors[rows[decided]] = found[decided]
        rows, width = rows[~decided], probabilities.shape[1]
    return floors


def _ranked_floors(
    probabilities: Tensor, floors: Tensor, rows: Tensor, plan: SamplingPlan, width: int
) -> tuple[Tensor, Tensor]:
    """(floors with top-k and top-p, whether the `width` largest were enough to tell)."""
    vocabulary = probabilities.shape[1]
    largest = probabilities.topk(width, dim=1).values
    top_ks, top_ps = plan.top_ks[rows], plan.top_ps[rows]
    decided = (top_ks <= width) | (top_ks >= vocabulary) | (width == vocabulary)
    nth = largest.gather(1, (top_ks.clamp(1, width) - 1)[:, None])[:, 0]
    limited = (top_ks > 0) & (top_ks < vocabulary)
    floors = torch.where(limited, torch.maximum(floors, nth), floors)

    kept = probabilities.masked_fill(probabilities < floors[:, None], 0)
    goal = top_ps * kept.sum(1, dtype=torch.float64)
    mass = torch.cumsum(largest, 1, dtype=torch.float64)
    reached = mass >= goal[:, None]
    last = reached.to(torch.uint8).argmax(1)
    nucleus = largest.gather(1, last[:, None])[:, 0]
    enough = reached.any(1) | (width == vocabulary)
    nucleus = torch.where(reached.any(1), nucleus, floors)
    floors = torch.where(top_ps < 1, torch.maximum(floors, nucleus), floors)
    return floors, decided & (enough | (top_ps >= 1))
