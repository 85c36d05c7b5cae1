"""Requests whose adapter went before they ran: deleted, or no longer granted to the tenant.

    comes up for dispatch     never marked as dispatched; the dispatcher ends it
    waits in the queue        taken out of it, unless a worker was faster, and ended
    runs                      ends as it would have

Ended means failed, with what submitting it now would answer: 404 `model_not_found`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import structlog
from sqlalchemy import exists, not_, or_, select
from sqlalchemy.sql.elements import ColumnElement

from gateway.errors import NotFound
from gateway.jobs.locking import Standing, lock
from gateway.jobs.settlement import Settlement, settle
from gateway.kit.context import Context
from gateway.kit.database import ReadSession
from gateway.kit.sql import among
from gateway.models import Adapter, AdapterGrant, AdapterRevision, Request
from gateway.models.request import is_out, is_queued
from worker.protocol.types import RequestId
from worker.queue.base import QueueUnavailable

_PAGE = 500

_log = structlog.get_logger(__name__)


def keeps_its_adapter() -> ColumnElement[bool]:
    """Of a request: its adapter, if it has one, is there and may be used by the tenant."""
    granted = (
        exists()
        .where(AdapterGrant.adapter_id == Adapter.id, AdapterGrant.tenant_id == Request.tenant_id)
        .correlate(Adapter, Request)
    )
    usable = exists().where(
        AdapterRevision.id == Request.adapter_revision_id,
        Adapter.id == AdapterRevision.adapter_id,
        Adapter.deleted_at.is_(None),
        or_(Adapter.tenant_id == Request.tenant_id, granted),
    )
    return or_(Request.adapter_revision_id.is_(None), usable)


async def withdrawn_among(session: ReadSession, ids: Sequence[str]) -> set[str]:
    rows = select(Request.id).where(among(session, Request.id, ids), not_(keeps_its_adapter()))
    return set(await session.scalars(rows))


async def withdraw(context: Context, adapter_id: str | None = None) -> int:
    """Ends what waits in the queue without its adapter and, of `adapter_id`, what waits in SQL.
    Returns how many. Idempotent; for a task, and for a sweep without an adapter."""
    total = await _end_unclaimed(context)
    if adapter_id is not None:
        total += await _end_queued(context, adapter_id)
    if total:
        _log.info("requests_withdrawn", adapter_id=adapter_id, count=total)
    return total


async def end_withdrawn(context: Context, ids: Collection[str], state: str = "queued") -> int:
    """Fails those of `ids` that are still in `state`."""
    async with context.database.write() as session:
        locked = await lock(session, ids)
        settlements = {
            request_id: _settlement(row)
            for request_id, row in locked.requests.items()
            if row.state == state
        }
        await settle(session, locked, settlements)
    try:
        await context.queues.bell.ring([RequestId(each) for each in settlements])
    except QueueUnavailable as error:
        _log.warning("end_not_rung", count=len(settlements), error=str(error))
    return len(settlements)


async def _end_unclaimed(context: Context) -> int:
    """What the queue gives back never runs; should we die before SQL knows, it counts as lost by
    the queue, and is found at its next dispatch. Raises QueueUnavailable."""
    last, total = "", 0
    while True:
        async with context.database.read() as session:
            page = await _unclaimed(session, last)
        by_model: dict[str, list[RequestId]] = {}
        for request_id, model in page:
            by_model.setdefault(model, []).append(RequestId(request_id))
        for model, ids in by_model.items():
            taken = await context.queues.queue(model).withdraw(ids)
            total += await end_withdrawn(context, taken, "dispatched") if taken else 0
        if len(page) < _PAGE:
            return total
        last = page[-1][0]


async def _unclaimed(session: ReadSession, last: str) -> Sequence[tuple[str, str]]:
    rows = await session.execute(
        select(Request.id, Request.base_model)
        .where(
            is_out(),
            Request.state == "dispatched",
            not_(keeps_its_adapter()),
            Request.id > last,
        )
        .order_by(Request.id)
        .limit(_PAGE)
    )
    return [(row[0], row[1]) for row in rows]


async def _end_queued(context: Context, adapter_id: str) -> int:
    total = 0
    of_adapter = select(AdapterRevision.id).where(AdapterRevision.adapter_id == adapter_id)
    queued = (
        select(Request.id)
        .where(is_queued(), Request.adapter_revision_id.in_(of_adapter), not_(keeps_its_adapter()))
        .limit(_PAGE)
    )
    while True:
        async with context.database.read() as session:
            page = list(await session.scalars(queued))
        ended = await end_withdrawn(context, page) if page else 0
        total += ended
        if not ended:  # nothing is left, or all of the page is somebody else's by now
            return total


def _settlement(row: Standing) -> Settlement:
    error = NotFound(
        f"The model '{row.model}' does not exist or you do not have access to it any more: its "
        "adapter was deleted or withdrawn before this request ran.",
        code="model_not_found",
        param="model",
    )
    return Settlement("failed", error.status, error.body())
