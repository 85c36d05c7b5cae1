"""Ends what is left of a batch, all at once, before its files are written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gateway.batches.repository import LineRepository
from gateway.billing.accounts import Change, apply
from gateway.jobs.settlement import dequeue
from gateway.kit.clock import now_ms
from gateway.kit.database import WriteSession
from gateway.models import Batch
from worker.protocol.types import RequestId

OPEN = ("held", "queued", "dispatched", "running")

Ending = Literal["cancelled", "expired"]

ERRORS: Mapping[Ending, dict[str, str]] = {
    "cancelled": {
        "code": "batch_cancelled",
        "message": "This request was not executed because the batch was cancelled.",
    },
    "expired": {
        "code": "batch_expired",
        "message": "This request could not be executed before the completion window expired.",
    },
}


@dataclass(slots=True)
class Stopped:
    """What the queue must be told after the commit: ids by base model."""

    ids: dict[str, list[RequestId]] = field(default_factory=lambda: defaultdict(list))


async def freeze(
    session: WriteSession, batch: Batch, ending: Ending, states: Sequence[str] = OPEN
) -> Stopped:
    """`batch` is locked. Its lines in `states` end with one error each; nothing is billed."""
    lines = LineRepository(session, batch.id)
    stopped = Stopped()
    if "running" in states:
        stopped = await in_queue(session, batch)
    ended = await lines.end(session, states, ending, ERRORS[ending])
    setattr(batch, ending, getattr(batch, ending) + len(ended))
    batch.enqueued_tokens -= sum(line.prompt_tokens for line in ended)
    if batch.model is None:
        waited: dict[tuple[str, str], int] = defaultdict(int)
        for line in ended:
            waited[batch.id, line.model] += line.prompt_tokens
        await dequeue(session, waited)
    released = Change(released=sum(line.reserved_nano for line in ended))
    await apply(session, {batch.tenant_id: released}, now_ms())
    return stopped


async def in_queue(session: WriteSession, batch: Batch) -> Stopped:
    stopped = Stopped()
    for base_model, request_id in await LineRepository(session, batch.id).out():
        stopped.ids[base_model].append(RequestId(request_id))
    return stopped
