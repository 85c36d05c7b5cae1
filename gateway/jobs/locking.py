"""Requests and batches that one transaction is about to change.

Every writer locks batches first, then requests, then accounts (`billing.accounts`), each in the
order of their ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from sqlalchemy import select

from gateway.kit.database import WriteSession
from gateway.kit.sql import among
from gateway.models import Batch, Request


@dataclass(slots=True)
class Standing:
    """A locked request as far as its progress, its answer and its bill need it: plain values, as
    thousands pass each second. A change is written by `settle` or `update_rows`."""

    id: str
    tenant_id: str
    key_id: str
    kind: str
    batch_id: str | None
    endpoint: str
    model: str
    base_model: str
    adapter_revision_id: str | None
    request_class: str
    state: str
    attempt: int
    failures: int
    crashes: int
    crashes_alone: int
    suspects: str | None
    prompt_tokens: int
    max_tokens: int
    price_id: str
    reserved_nano: int
    webhook_endpoint_id: str | None
    webhook_url: str | None
    created_at: int
    started_at: int | None
    cancel_requested_at: int | None


_COLUMNS = [getattr(Request, field.name) for field in fields(Standing)]


@dataclass(frozen=True, slots=True)
class Locked:
    """Rows that nobody else changes until the transaction ends."""

    requests: Mapping[str, Standing]
    batches: Mapping[str, Batch]


async def lock(session: WriteSession, request_ids: Iterable[str]) -> Locked:
    ids = sorted(set(request_ids))
    named = among(session, Request.id, ids)
    of_batches = select(Request.batch_id).where(named, Request.batch_id.is_not(None))
    batches = await session.scalars(
        select(Batch)
        .where(Batch.id.in_(of_batches.distinct()))
        .order_by(Batch.id)
        .with_for_update(key_share=True)
    )
    batches_by_id = {batch.id: batch for batch in batches}
    requests = await session.execute(
        select(*_COLUMNS).where(named).order_by(Request.id).with_for_update(key_share=True)
    )
    standing = [Standing(*row) for row in requests]
    return Locked({each.id: each for each in standing}, batches_by_id)
