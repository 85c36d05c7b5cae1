"""Corrections: a row beside the one it corrects, never a change of it."""

from __future__ import annotations

from sqlalchemy import func, select

from gateway.billing.accounts import Change, apply
from gateway.billing.booking import book
from gateway.billing.service import dollars
from gateway.errors import BadRequest, NotFound
from gateway.kit.clock import now_ms
from gateway.kit.database import ReadSession, WriteSession
from gateway.kit.ids import new_id
from gateway.kit.pagination import Page, PageRequest, fetch_page
from gateway.models import UsageRecord


async def correct(
    session: WriteSession, request_id: str, amount_nano: int, reason: str
) -> UsageRecord:
    """Bills so much more for a request, or less: never less than nothing in all. It is of the
    running month. Raises NotFound, BadRequest."""
    rows = select(UsageRecord).where(UsageRecord.request_id == request_id)
    usage = await session.scalar(rows.with_for_update())
    if usage is None:
        raise NotFound(f"Nothing was billed for a request '{request_id}'.", param="request_id")
    corrected = await session.scalar(
        select(func.sum(UsageRecord.amount_nano)).where(UsageRecord.corrects_id == usage.id)
    )
    billed = usage.amount_nano + int(corrected or 0)
    if billed + amount_nano < 0:
        raise BadRequest(
            f"Only ${dollars(billed)} are billed for the request.",
            code="invalid_value",
            param="amount_nano",
        )
    alike = ("tenant_id", "key_id", "model", "base_model", "adapter_revision_id")
    correction = {
        "id": new_id("usage"),
        "corrects_id": usage.id,
        **{name: getattr(usage, name) for name in (*alike, "request_class", "price_id")},
        **dict.fromkeys(("prompt_tokens", "cached_tokens", "completion_tokens"), 0),
        "amount_nano": amount_nano,
        "reason": reason,
        "created_at": now_ms(),
    }
    await book(session, [correction])
    await apply(session, {usage.tenant_id: Change(spent=amount_nano)}, correction["created_at"])
    return await session.get_one(UsageRecord, correction["id"])


async def corrections(
    session: ReadSession, tenant_id: str | None, page: PageRequest
) -> Page[UsageRecord]:
    rows = select(UsageRecord).where(UsageRecord.corrects_id.is_not(None))
    if tenant_id is not None:
        rows = rows.where(UsageRecord.tenant_id == tenant_id)
    return await fetch_page(session, UsageRecord, rows, page)
