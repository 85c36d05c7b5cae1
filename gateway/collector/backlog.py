"""Queued rows of one model, and how much of each tenant and class is already in the queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import exists, func, or_, select
from sqlalchemy.sql.elements import ColumnElement

from gateway.kit.database import ReadSession, WriteSession
from gateway.models import Batch, Request
from gateway.models.request import is_out, is_queued
from worker.protocol.types import REQUEST_CLASSES


class Share(NamedTuple):
    tenant_id: str
    request_class: str


@dataclass(frozen=True, slots=True)
class Queued:
    """A row that may be dispatched: what its body, and so its message, is made from."""

    id: str
    batch_id: str | None
    endpoint: str
    seed: int
    adapter_revision_id: str | None
    body: dict[str, Any] | None
    input_offset: int | None
    input_length: int | None


_COLUMNS = [getattr(Request, name) for name in Queued.__slots__]


async def waiting(session: ReadSession, model: str) -> list[Share]:
    """Tenants and classes with queued rows. Each tenant is found by one step along the index
    from the one before, so that neither idle tenants nor the number of rows cost anything."""
    first = select(_next_tenant(model).label("tenant_id")).cte("waiting", recursive=True)
    found = first.union_all(
        select(_next_tenant(model, first.c.tenant_id)).where(first.c.tenant_id.is_not(None))
    )
    has_queued = [_queued(model, found.c.tenant_id, name).label(name) for name in REQUEST_CLASSES]
    rows = await session.execute(
        select(found.c.tenant_id, *has_queued).where(found.c.tenant_id.is_not(None))
    )
    return [
        Share(tenant_id, request_class)
        for tenant_id, *answers in rows
        for request_class, has_any in zip(REQUEST_CLASSES, answers, strict=True)
        if has_any
    ]


def _next_tenant(model: str, after: ColumnElement[Any] | None = None) -> ColumnElement[Any]:
    tenants = select(Request.tenant_id).where(Request.base_model == model, is_queued())
    if after is not None:
        tenants = tenants.where(Request.tenant_id > after)
    return tenants.order_by(Request.tenant_id).limit(1).scalar_subquery()


def _queued(model: str, tenant: ColumnElement[Any], request_class: str) -> ColumnElement[bool]:
    return exists().where(
        Request.base_model == model,
        Request.tenant_id == tenant,
        Request.request_class == request_class,
        is_queued(),
    )


async def outstanding(session: ReadSession | WriteSession, model: str) -> dict[Share, int]:
    rows = await session.execute(
        select(Request.tenant_id, Request.request_class, func.count())
        .where(Request.base_model == model, is_out())
        .group_by(Request.tenant_id, Request.request_class)
    )
    return {Share(tenant_id, request_class): count for tenant_id, request_class, count in rows}


async def next_queued(session: ReadSession, model: str, share: Share, limit: int) -> list[Queued]:
    running_batch = exists().where(Batch.id == Request.batch_id, Batch.status == "in_progress")
    rows = await session.execute(
        select(*_COLUMNS)
        .where(
            Request.base_model == model,
            Request.tenant_id == share.tenant_id,
            Request.request_class == share.request_class,
            is_queued(),
            Request.cancel_requested_at.is_(None),
            or_(Request.batch_id.is_(None), running_batch),
        )
        .order_by(Request.sort_key, Request.id)
        .limit(limit)
    )
    return [Queued(*row) for row in rows]
