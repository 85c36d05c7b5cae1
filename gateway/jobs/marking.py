"""The compare-and-set that takes requests out of SQL: queued → dispatched, attempt + 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import exists, or_, select, update

from gateway.jobs.withdrawal import keeps_its_adapter
from gateway.kit.clock import now_ms
from gateway.kit.database import WriteSession
from gateway.kit.sql import among
from gateway.models import AdapterRevision, Batch, Request, Tenant
from gateway.models.request import is_queued
from worker.protocol.types import AdapterRef


@dataclass(frozen=True, slots=True)
class Marked:
    """What a message says of its row, as it is now."""

    id: str
    tenant_id: str
    base_model: str
    request_class: str
    adapter_revision_id: str | None
    attempt: int
    suspects: str | None
    seed: int
    max_tokens: int
    sort_key: str
    deadline_at: int | None


_COLUMNS = [getattr(Request, name) for name in Marked.__slots__]


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A row as marked, and what its message needs from others."""

    row: Marked
    weight: float
    adapter: AdapterRef | None


async def mark_dispatched(
    session: WriteSession, ids: Sequence[str], epoch: str
) -> dict[str, Dispatched]:
    """Those of `ids` that were free to go, by id: queued, not cancelled, their batch running,
    their adapter still there."""
    running_batch = exists().where(Batch.id == Request.batch_id, Batch.status == "in_progress")
    free = (
        select(Request.id)
        .where(
            among(session, Request.id, ids),
            is_queued(),
            Request.cancel_requested_at.is_(None),
            or_(Request.batch_id.is_(None), running_batch),
            keeps_its_adapter(),
        )
        .order_by(Request.id)
        .with_for_update(key_share=True, skip_locked=True, of=Request)
    )
    rows = await session.execute(
        update(Request)
        .where(Request.id.in_(free))
        .values(
            state="dispatched",
            attempt=Request.attempt + 1,
            epoch=epoch,
            dispatched_at=now_ms(),
            started_at=None,
        )
        .returning(*_COLUMNS)
        .execution_options(synchronize_session=False)
    )
    marked = [Marked(*row) for row in rows]
    weights = await _weights(session, {row.tenant_id for row in marked})
    adapters = await _adapters(session, {row.adapter_revision_id for row in marked})
    return {
        row.id: Dispatched(row, weights[row.tenant_id], adapters.get(row.adapter_revision_id))
        for row in marked
    }


async def _weights(session: WriteSession, tenants: set[str]) -> dict[str, float]:
    rows = await session.execute(
        select(Tenant.id, Tenant.weight).where(among(session, Tenant.id, sorted(tenants)))
    )
    return {row[0]: row[1] for row in rows}


async def _adapters(
    session: WriteSession, revisions: set[str | None]
) -> dict[str | None, AdapterRef]:
    ids = sorted(each for each in revisions if each is not None)
    if not ids:
        return {}
    rows = await session.execute(
        select(AdapterRevision.id, AdapterRevision.digest, AdapterRevision.rank).where(
            among(session, AdapterRevision.id, ids)
        )
    )
    return {
        revision_id: AdapterRef(digest=digest, rank=rank or 0)
        for revision_id, digest, rank in rows
        if digest
    }
