"""Finds batches that nobody works on: whatever a lost message would have started."""

from __future__ import annotations

from sqlalchemy import ColumnElement, and_, case, func, or_, select

from gateway.kit.clock import now_ms
from gateway.kit.context import Context
from gateway.kit.task_names import FINALIZE, VALIDATE
from gateway.kit.tasks import Tasks
from gateway.models import Batch, Heartbeat

_AT_ONCE = 200
_WORKED_ON = {
    "validating": Batch.created_at,
    "finalizing": Batch.finalizing_at,
    "cancelling": Batch.cancelling_at,
}
"""By status: since when somebody should work on it."""


def activity(batch_id: str) -> str:
    """The heartbeat of whoever validates or finalises the batch."""
    return f"batch:{batch_id}"


async def sweep_batches(context: Context, tasks: Tasks, silent_ms: int | None = None) -> int:
    """Returns how many tasks were sent: for the batches that expire first, so many at once.
    `silent_ms` instead of the setting."""
    if silent_ms is None:
        silent_ms = round(context.settings.silent_seconds * 1000)
    rows = (
        select(Batch.id, Batch.status)
        .outerjoin(Heartbeat, Heartbeat.name == "batch:" + Batch.id)
        .where(_is_due(now_ms(), silent_ms))
        .order_by(Batch.expires_at, Batch.id)
        .limit(_AT_ONCE)
    )
    async with context.database.read() as session:
        due = (await session.execute(rows)).all()
    for batch_id, status in due:
        await tasks.send(VALIDATE if status == "validating" else FINALIZE, batch_id)
    return len(due)


def _is_due(now: int, silent_ms: int) -> ColumnElement[bool]:
    """Expired, or nobody has worked on it for so long: a sixth of that when nobody ever has."""
    heard = case((Heartbeat.at.is_(None), now - silent_ms // 6), else_=now - silent_ms)
    is_silent = func.coalesce(Heartbeat.at, 0) <= heard
    return or_(
        and_(Batch.status == "in_progress", Batch.expires_at <= now),
        *(
            and_(Batch.status == status, func.coalesce(since, 0) <= heard, is_silent)
            for status, since in _WORKED_ON.items()
        ),
    )
