"""The last step of a batch: its terminal state, and the event that tells of it."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.batches.state import BatchStatus, check_transition
from gateway.kit.database import WriteSession
from gateway.models import Batch
from gateway.webhooks.events import EventType
from gateway.webhooks.service import record

EVENTS: Mapping[BatchStatus, EventType] = {
    "completed": "batch.completed",
    "failed": "batch.failed",
    "expired": "batch.expired",
    "cancelled": "batch.cancelled",
}


async def end_batch(session: WriteSession, batch: Batch, status: BatchStatus, now: int) -> None:
    """`batch` is locked. Raises IllegalTransition."""
    check_transition(batch.status, status)
    batch.status = status
    setattr(batch, f"{status}_at", now)
    await record(session, batch.tenant_id, EVENTS[status], {"id": batch.id})
