"""Queued rows of one model, and how much of each tenant and class is already in the queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import exists, func, or_, select

from gateway.jobs.states import is_out, is_queued
from gateway.kit.database import ReadSession, WriteSession
from gateway.models import Batch, Request, Tenant
from worker.protocol.types import REQUEST_CLASSES


class Share(NamedTuple):
    tenant_id: str
    request_class: str


async def waiting(session: ReadSession, model: str) -> list[Share]:
    """Tenants and classes with queued rows, found by one probe of the index each."""
    shares = []
    for request_class in REQUEST_CLASSES:
        queued = exists().where(
            Request.base_model == model,
            Request.tenant_id == Tenant.id,
            Request.request_class == request_class,
            is_queued(),
        )
        tenants = await session.scalars(select(Tenant.id).where(queued).order_by(Tenant.id))
        shares += [Share(tenant_id, request_class) for tenant_id in tenants]
    return shares


async def outstanding(session: ReadSession | WriteSession, model: str) -> dict[Share, int]:
    rows = await session.execute(
        select(Request.tenant_id, Request.request_class, func.count())
        .where(Request.base_model == model, is_out())
        .group_by(Request.tenant_id, Request.request_class)
    )
    return {Share(tenant_id, request_class): count for tenant_id, request_class, count in rows}


async def next_queued(
    session: ReadSession, model: str, share: Share, limit: int
) -> Sequence[Request]:
    running_batch = exists().where(Batch.id == Request.batch_id, Batch.status == "in_progress")
    rows = await session.scalars(
        select(Request)
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
    return rows.all()
