"""Whether a request can ever be answered here."""

from __future__ import annotations

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
    if sampling.max_tokens < 1 or sampling.n < 1:
        raise InvalidRequest("max_tokens and n must be at least 1")
    if len(prompt) >= config.context_tokens:
        raise ContextLengthExceeded(
            f"the prompt has {len(prompt)} tokens; prompt and answer share a context of "
            f"{config.context_tokens}"
        )
    most = min(len(prompt) + sampling.max_tokens, config.context_tokens) - 1
    if most > config.kv_tokens:
        raise CapacityExceeded(
            f"{most} tokens are needed at once; this worker holds {config.kv_tokens}"
        )
    if adapter is not None and adapter.rank > config.adapter_rank:
        raise CapacityExceeded(
            f"the adapter has rank {adapter.rank}; this worker holds {config.adapter_rank}"
        )
