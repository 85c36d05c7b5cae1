"""The compare-and-set that takes requests out of SQL: queued → dispatched, attempt + 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import exists, or_, select, update

from gateway.jobs.states import is_queued
from gateway.kit.clock import now_ms
from gateway.kit.database import WriteSession
from gateway.models import AdapterRevision, Batch, Request, Tenant
from worker.protocol.types import AdapterRef


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A row as marked, and what its message needs from others."""

    request: Request
    weight: float
    adapter: AdapterRef | None


async def mark_dispatched(
    session: WriteSession, ids: Sequence[str], epoch: str
) -> dict[str, Dispatched]:
    """Those of `ids` that were free to go, by id: queued, not cancelled, their batch running."""
    running_batch = exists().where(Batch.id == Request.batch_id, Batch.status == "in_progress")
    free = (
        select(Request.id)
        .where(
            Request.id.in_(ids),
            is_queued(),
            Request.cancel_requested_at.is_(None),
            or_(Request.batch_id.is_(None), running_batch),
        )
        .order_by(Request.id)
        .with_for_update(key_share=True, skip_locked=True, of=Request)
    )
    won = list(await session.scalars(free))
    await session.execute(
        update(Request)
        .where(Request.id.in_(won))
        .values(
            state="dispatched",
            attempt=Request.attempt + 1,
            epoch=epoch,
            dispatched_at=now_ms(),
            started_at=None,
        )
        .execution_options(synchronize_session=False)
    )
    rows = await session.execute(
        select(Request, Tenant.weight, AdapterRevision.digest, AdapterRevision.rank)
        .join(Tenant, Tenant.id == Request.tenant_id)
        .outerjoin(AdapterRevision, AdapterRevision.id == Request.adapter_revision_id)
        .where(Request.id.in_(won))
    )
    return {
        request.id: Dispatched(
            request, weight, AdapterRef(digest=digest, rank=rank or 0) if digest else None
        )
        for request, weight, digest, rank in rows
    }
