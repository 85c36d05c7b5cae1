"""The one way from SQL into the queue, for the API's fast path and the dispatcher alike.

    compare-and-set queued → dispatched, attempt + 1, epoch; commit; then an idempotent enqueue

What is lost between the commit and the enqueue is found by the collector: dispatched, and not
known to the queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import msgspec

from gateway.jobs.locking import lock
from gateway.jobs.marking import Dispatched, mark_dispatched
from gateway.jobs.ordering import queue_order
from gateway.jobs.settlement import Settlement, settle
from gateway.kit.context import Context
from gateway.kit.shared_prefixes import SharedPrefixTable
from gateway.system_prompts.service import shared_prefixes
from worker.protocol.messages import GenerateRequest
from worker.protocol.types import RequestClass, RequestId, SamplingParams, TenantId


@dataclass(frozen=True, slots=True)
class Prepared:
    """A queued request with what its body says, `max_tokens` and seed as pinned."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    stream: bool = False


async def dispatch(context: Context, model: str, prepared: Sequence[Prepared]) -> int:
    """Returns how many were enqueued. Raises QueueUnavailable: rows stay queued, or are found
    again after a while."""
    queue = context.queues.queue(model)
    epoch = await queue.epoch()
    shared = await shared_prefixes(context)
    async with context.database.write() as session:
        marked = await mark_dispatched(session, [each.request_id for each in prepared], epoch)
    messages = [
        _message(marked[each.request_id], each, epoch, shared)
        for each in prepared
        if each.request_id in marked
    ]
    if not messages:
        return 0
    outcomes = await queue.enqueue(messages)
    cancelled = [
        message.request_id
        for message, outcome in zip(messages, outcomes, strict=True)
        if outcome == "cancelled"
    ]
    if cancelled:
        await _settle_cancelled(context, cancelled)
    return len(messages) - len(cancelled)


def _message(
    dispatched: Dispatched, prepared: Prepared, epoch: str, shared: SharedPrefixTable
) -> GenerateRequest:
    row, adapter = dispatched.row, dispatched.adapter
    digest = adapter.digest if adapter else ""
    return GenerateRequest(
        request_id=RequestId(row.id),
        attempt=row.attempt,
        epoch=epoch,
        tenant=TenantId(row.tenant_id),
        model=row.base_model,
        prompt_ids=prepared.prompt_ids,
        sampling=msgspec.structs.replace(
            prepared.sampling, max_tokens=row.max_tokens, seed=row.seed
        ),
        request_class=cast(RequestClass, row.request_class),
        adapter=adapter,
        cache_scope=row.tenant_id,
        deadline=None if row.deadline_at is None else row.deadline_at / 1000,
        weight=dispatched.weight,
        order=queue_order(row.sort_key),
        suspects=row.suspects or "",
        stream=prepared.stream,
        shared_tokens=shared.covered(row.base_model, digest, prepared.prompt_ids),
    )


async def _settle_cancelled(context: Context, ids: Sequence[str]) -> None:
    async with context.database.write() as session:
        locked = await lock(session, ids)
        await settle(session, locked, dict.fromkeys(locked.requests, CANCELLED))


CANCELLED = Settlement(
    "cancelled", error={"code": "cancelled", "message": "This request was cancelled."}
)
