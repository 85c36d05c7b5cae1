from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, cast, exists, func, or_, select

from gateway.auth.scope import TenantScope
from gateway.kit.database import ReadSession, WriteSession
from gateway.kit.months import end_of, start_of
from gateway.kit.pagination import Page, PageRequest, fetch_page
from gateway.models import Invoice, InvoiceLine, StorageRecord, Tenant, UsageHour

Session = ReadSession | WriteSession
Table = type[UsageHour] | type[StorageRecord]


@dataclass(frozen=True, slots=True)
class Sum:
    """What one model, class and price came to; `kind` is usage, correction or storage."""

    kind: str
    model: str
    request_class: str
    price_id: str | None
    amount_nano: int
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    byte_hours: int = 0


class InvoiceRepository:
    """One tenant's invoices, and what they are made of: sums of hours, in which months begin."""

    def __init__(self, session: Session, scope: TenantScope) -> None:
        self._session = session
        self._tenant_id = scope.tenant_id

    async def get(self, month: str) -> Invoice | None:
        rows = select(Invoice).where(Invoice.tenant_id == self._tenant_id, Invoice.month == month)
        return await self._session.scalar(rows)

    async def page(self, page: PageRequest) -> Page[Invoice]:
        rows = select(Invoice).where(Invoice.tenant_id == self._tenant_id)
        return await fetch_page(self._session, Invoice, rows, page)

    async def lines(self, invoice: Invoice) -> Sequence[InvoiceLine]:
        rows = select(InvoiceLine).where(InvoiceLine.invoice_id == invoice.id)
        return (await self._session.scalars(rows.order_by(InvoiceLine.number))).all()

    async def usage(self, month: str) -> list[Sum]:
        group = (UsageHour.kind, UsageHour.model, UsageHour.request_class, UsageHour.price_id)
        counted = (
            UsageHour.amount_nano,
            UsageHour.requests,
            UsageHour.prompt_tokens,
            UsageHour.cached_tokens,
            UsageHour.completion_tokens,
        )
        rows = select(*group, *map(_total, counted))
        rows = rows.where(*self._in(UsageHour, month)).group_by(*group).order_by(*group)
        return [Sum(*tuple(of)) for of in await self._session.execute(rows)]

    async def storage(self, month: str) -> list[Sum]:
        price = StorageRecord.price_id
        rows = select(price, _total(StorageRecord.amount_nano), _total(StorageRecord.bytes))
        rows = rows.where(*self._in(StorageRecord, month)).group_by(price).order_by(price)
        return [
            Sum("storage", "", "", price_id, amount, byte_hours=size)
            for price_id, amount, size in await self._session.execute(rows)
        ]

    async def late(self, month: str) -> int:
        """Nanodollars used in a month that is invoiced, and not on any invoice."""
        used = 0
        for table in _TABLES:
            rows = select(_total(table.amount_nano)).where(*self._in(table, month))
            used += await self._session.scalar(rows) or 0
        invoiced = (
            select(_total(InvoiceLine.amount_nano))
            .join(Invoice, Invoice.id == InvoiceLine.invoice_id)
            .where(Invoice.tenant_id == self._tenant_id, InvoiceLine.period == month)
        )
        return used - (await self._session.scalar(invoiced) or 0)

    async def was_active(self, month: str) -> bool:
        """Whether anything was used."""
        rows = or_(*(exists().where(*self._in(table, month)) for table in _TABLES))
        return bool(await self._session.scalar(select(rows)))

    def _in(self, table: Table, month: str) -> tuple[ColumnElement[bool], ...]:
        return (table.tenant_id == self._tenant_id, *_within(table, start_of(month), end_of(month)))


async def uninvoiced(session: Session, month: str, since: str, limit: int) -> Sequence[str]:
    """Tenants without an invoice of `month` that used something from the month `since` on."""
    start, end = start_of(since), end_of(month)
    active = (
        exists().where(table.tenant_id == Tenant.id, *_within(table, start, end))
        for table in _TABLES
    )
    invoiced = exists().where(Invoice.tenant_id == Tenant.id, Invoice.month == month)
    rows = select(Tenant.id).where(~invoiced, or_(*active)).order_by(Tenant.id).limit(limit)
    return (await session.scalars(rows)).all()


_TABLES: tuple[Table, ...] = (UsageHour, StorageRecord)


def _within(table: Table, start: int, end: int) -> tuple[ColumnElement[bool], ...]:
    return table.created_at >= start, table.created_at < end


def _total(column: Any) -> ColumnElement[int]:
    return cast(func.coalesce(func.sum(column), 0), BigInteger)
