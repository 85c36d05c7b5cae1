"""The definition in torch, without ordering the vocabulary where its head decides.

A row with a filter mostly keeps a few of its largest probabilities: those alone are then looked
at. Rows without one, and those whose filter keeps more, take the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.sample import Logprobs, SamplingPlan

HEAD = 256  # largest probabilities looked at first


def sample(logits: Tensor, plan: SamplingPlan) -> Tensor:
    """See `kernels.sample.sample`."""
    highest, chosen = logits.max(1)
    broken = highest.isfinite().logical_not()
    chosen = chosen.masked_fill(broken, -1)
    rows = (broken | (plan.temperatures == 0)).logical_not().nonzero()[:, 0]
    if not rows.numel():
        return chosen
    probabilities = _probabilities(_take(logits, rows), plan.temperatures[rows])
    plan = _take_plan(plan, rows)
    filtered = (plan.top_ks > 0) | (plan.top_ps < 1) | (plan.min_ps > 0)

    undecided = filtered.nonzero()[:, 0]
    if undecided.numel() and probabilities.shape[1] > HEAD:
        tokens, decided = _sample_head(_take(probabilities, undecided), _take_plan(plan, undecided))
        chosen[rows[undecided[decided]]] = tokens[decided]
        undecided = undecided[~decided]
    rest = torch.cat([undecided, filtered.logical_not().nonzero()[:, 0]]).sort().values
    if rest.numel():
        tokens = _sample_whole(_take(probabilities, rest), _take_plan(plan, rest))
        chosen[rows[rest]] = tokens
    return chosen


def logprobs(logits: Tensor, rows: Sequence[int], tokens: Sequence[int], count: int) -> Logprobs:
    """See `kernels.sample.logprobs`."""
    places = torch.tensor([rows, tokens], dtype=torch.int64, device=logits.device)
    scores = torch.log_softmax(logits[places[0]], 1)
    top = scores.topk(count, dim=1)
    return Logprobs(scores.gather(1, places[1, :, None])[:, 0], top.values, top.indices)


def _probabilities(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Never NaN: the largest logit becomes 0 before anything is divided, so that no quotient
    overflows upwards, and no divisor is infinite or so small that the processor takes it for 0."""
    shifted = logits - logits.amax(1, keepdim=True)
    limits = torch.finfo(torch.float32)
    divisors = temperatures.clamp(limits.tiny, limits.max)
    return torch.softmax(shifted.div_(divisors[:, None]), 1)


def _sample_head(probabilities: Tensor, plan: SamplingPlan) -> tuple[Tensor, Tensor]:
    """(tokens, whether nothing outside of the head is kept)."""
    largest, tokens = probabilities.topk(HEAD, dim=1)
    floors = torch.maximum(_top_k_floors(largest, plan.top_ks), plan.min_ps * largest[:, 0])
    outside = floors <= largest[:, -1]  # the head doesn't hold all that these filters keep
    kept = largest.masked_fill(largest < floors[:, None], 0).sum(1, dtype=torch.float64)
    whole = probabilities.sum(1, dtype=torch.float64)
    unlimited = (plan.top_ks == 0) & (plan.min_ps == 0)
    floors = torch.maximum(
        floors, _top_p_floors(largest, torch.where(unlimited, whole, kept), plan.top_ps)
    )
    decided = (floors > largest[:, -1]) & (unlimited | ~outside)
    order = tokens.argsort(1)
    weights = largest.masked_fill(largest < floors[:, None], 0).gather(1, order)
    return tokens.gather(1, order).gather(1, _pick(weights, plan.uniforms))[:, 0], decided


def _sample_whole(probabilities: Tensor, plan: SamplingPlan) -> Tensor:
    floors = plan.min_ps * probabilities.amax(1)
    if bool(((plan.top_ks > 0) | (plan.top_ps < 1)).any()):
        largest = probabilities.sort(1, descending=True).values
        floors = torch.maximum(floors, _top_k_floors(largest, plan.top_ks))
        kept = largest.masked_fill(largest < floors[:, None], 0).sum(1, dtype=torch.float64)
        floors = torch.maximum(floors, _top_p_floors(largest, kept, plan.top_ps))
    if bool((floors > 0).any()):
        probabilities = probabilities.masked_fill(probabilities < floors[:, None], 0)
    return _pick(probabilities, plan.uniforms)[:, 0]


def _top_k_floors(largest: Tensor, top_ks: Tensor) -> Tensor:
    """The k-th largest probability of each row; 0 where `largest` doesn't reach that far."""
    width = largest.shape[1]
    nth = largest.gather(1, (top_ks.clamp(1, width) - 1)[:, None])[:, 0]
    return nth.masked_fill((top_ks == 0) | (top_ks > width), 0)


def _top_p_floors(largest: Tensor, kept: Tensor, top_ps: Tensor) -> Tensor:
    """The last probability of each row's nucleus; 0 where `largest` doesn't reach that far."""
    reached = torch.cumsum(largest, 1, dtype=torch.float64) >= (top_ps * kept)[:, None]
    last = reached.to(torch.uint8).argmax(1)
    nucleus = largest.gather(1, last[:, None])[:, 0]
    return nucleus.masked_fill(~reached.any(1) | (top_ps >= 1), 0)


def _pick(weights: Tensor, uniforms: Tensor) -> Tensor:
    """int64 [rows, 1]: the first column whose cumulative weight exceeds uniform * total."""
    cumulative = torch.cumsum(weights, 1, dtype=torch.float64)
    total = cumulative[:, -1]
    targets = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, targets[:, None], right=True)


def _take(rows: Tensor, indices: Tensor) -> Tensor:
    """`rows[indices]` of ascending `indices`, without a copy where that is all of them."""
    return rows if indices.numel() == rows.shape[0] else rows[indices]


def _take_plan(plan: SamplingPlan, indices: Tensor) -> SamplingPlan:
    return SamplingPlan(
        temperatures=plan.temperatures[indices],
        top_ks=plan.top_ks[indices],
        top_ps=plan.top_ps[indices],
        min_ps=plan.min_ps[indices],
        uniforms=plan.uniforms[indices],
    )
