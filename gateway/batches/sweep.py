"""Finds batches that nobody works on: whatever a lost message would have started."""

from __future__ import annotations

from sqlalchemy import select

from gateway.kit.clock import now_ms
from gateway.kit.context import Context
from gateway.kit.task_names import FINALIZE, VALIDATE
from gateway.kit.tasks import Tasks
from gateway.models import Batch, Heartbeat

_AT_ONCE = 200


def activity(batch_id: str) -> str:
    """The heartbeat of whoever validates or finalises the batch."""
    return f"batch:{batch_id}"


async def sweep_batches(context: Context, tasks: Tasks, silent_ms: int | None = None) -> int:
    """Returns how many tasks were sent. `silent_ms` instead of the setting."""
    now = now_ms()
    if silent_ms is None:
        silent_ms = round(context.settings.silent_seconds * 1000)
    async with context.database.read() as session:
        rows = await session.execute(
            select(Batch, Heartbeat.at)
            .outerjoin(Heartbeat, Heartbeat.name == "batch:" + Batch.id)
            .where(Batch.status.in_(("validating", "in_progress", "finalizing", "cancelling")))
            .order_by(Batch.expires_at)
        )
        due = [(row[0].id, name) for row in rows if (name := _due(row[0], row[1], now, silent_ms))]
    for batch_id, name in due[:_AT_ONCE]:
        await tasks.send(name, batch_id)
    return len(due[:_AT_ONCE])


def _due(batch: Batch, beaten_at: int | None, now: int, silent_ms: int) -> str | None:
    began = {
        "validating": batch.created_at,
        "in_progress": batch.expires_at,
        "finalizing": batch.finalizing_at,
        "cancelling": batch.cancelling_at,
    }[batch.status]
    if batch.status == "in_progress" and (began or 0) > now:
        return None
    patience = silent_ms if beaten_at is not None else silent_ms // 6
    since = max(began or 0, beaten_at or 0)
    if batch.status != "in_progress" and now - since < patience:
        return None
    return VALIDATE if batch.status == "validating" else FINALIZE
