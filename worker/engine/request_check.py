"""Whether a request can ever be answered here."""

from __future__ import annotations

import math
from collections.abc import Iterator

from worker.engine.config import SchedulerConfig
from worker.engine.errors import CapacityExceeded, ContextLengthExceeded, InvalidRequest
from worker.protocol.types import AdapterRef, SamplingParams


def check_request(
    config: SchedulerConfig,
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    adapter: AdapterRef | None,
) -> None:
    """Raises InvalidRequest, ContextLengthExceeded or CapacityExceeded.

    The last token of an answer needs no KV, so one token less must fit than are sent and asked
    for.
    """
    if not prompt:
        raise InvalidRequest("the prompt is empty")
    if config.vocabulary and not 0 <= min(prompt) <= max(prompt) < config.vocabulary:
        raise InvalidRequest(
            f"the prompt names tokens outside of the {config.vocabulary} there are"
        )
    if problem := next(_problems(sampling), None):
        raise InvalidRequest(problem)
    if len(prompt) >= config.context_tokens:
        raise ContextLengthExceeded(
            f"the prompt has {len(prompt)} tokens; prompt and answer share a context of "
            f"{config.context_tokens}"
        )
    most = min(len(prompt) + sampling.max_tokens, config.context_tokens) - 1
    if config.most_blocks(most) > config.request_blocks:
        raise CapacityExceeded(
            f"{most} tokens are needed at once; this worker holds {config.kv_tokens}"
        )
    if adapter is not None and adapter.rank > config.adapter_rank:
        raise CapacityExceeded(
            f"the adapter has rank {adapter.rank}; this worker holds {config.adapter_rank}"
        )


MAX_CHOICES = 1024
"""More than any API allows; each choice is a sequence, made when the request is added."""


def _problems(sampling: SamplingParams) -> Iterator[str]:
    """What no sampler can do. Comparisons are written so that NaN fails them."""
    if sampling.max_tokens < 1:
        yield f"max_tokens must be at least 1, not {sampling.max_tokens}"
    if not 1 <= sampling.n <= MAX_CHOICES:
        yield f"n must be from 1 to {MAX_CHOICES}, not {sampling.n}"
    if not 0 <= sampling.temperature < math.inf:
        yield f"temperature must be at least 0 and finite, not {sampling.temperature}"
    if not 0 < sampling.top_p <= 1:
        yield f"top_p must be above 0 and at most 1, not {sampling.top_p}"
    if not 0 <= sampling.min_p <= 1:
        yield f"min_p must be from 0 to 1, not {sampling.min_p}"
    if not 0 <= sampling.top_k < 2**63:
        yield f"top_k must be at least 0, not {sampling.top_k}"
    if not 0 < sampling.repetition_penalty < math.inf:
        yield f"repetition_penalty must be above 0 and finite, not {sampling.repetition_penalty}"
    for name in ("presence_penalty", "frequency_penalty"):
        if not math.isfinite(getattr(sampling, name)):
            yield f"{name} must be finite, not {getattr(sampling, name)}"
    if sampling.logprobs is not None and sampling.logprobs < 0:
        yield f"logprobs must be at least 0, not {sampling.logprobs}"
    if not all(math.isfinite(bias) for _, bias in sampling.logit_bias):
        yield "logit_bias must be finite"
