"""The audit's questions. Ask them in a repeatable session: of one moment of a running system."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    case,
    cast,
    func,
    or_,
    select,
    union_all,
)

from gateway.billing.booking import HOUR_MS
from gateway.kit.database import ReadSession
from gateway.kit.months import end_of, start_of
from gateway.models import (
    Account,
    Batch,
    File,
    Invoice,
    InvoiceLine,
    Price,
    Request,
    Result,
    StoragePrice,
    StorageRecord,
    UsageHour,
    UsageRecord,
)
from gateway.models.request import is_open

_ENDED = ("completed", "expired", "cancelled")
_CHUNK = 1000


@dataclass(frozen=True, slots=True)
class Tokens:
    prompt: int = 0
    cached: int = 0
    completion: int = 0

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(
            self.prompt + other.prompt,
            self.cached + other.cached,
            self.completion + other.completion,
        )


@dataclass(frozen=True, slots=True)
class BatchTokens:
    batch_id: str
    counted: Tokens
    metered: Tokens
    completed: int
    metered_requests: int


@dataclass(frozen=True, slots=True)
class InvoicedMonth:
    """`invoiced` on whatever invoice. Of the newest one's month more may be `used` since: the next
    invoice will say so."""

    invoice_id: str
    used: int
    invoiced: int
    is_newest: bool


class AuditRepository:
    """Reads across tenants: for operators alone."""

    def __init__(self, session: ReadSession) -> None:
        self._session = session

    async def unmetered(self) -> Sequence[str]:
        """Completed requests without a usage row."""
        rows = (
            select(Request.id)
            .outerjoin(UsageRecord, UsageRecord.request_id == Request.id)
            .where(Request.state == "completed", UsageRecord.id.is_(None))
            .order_by(Request.id)
        )
        return (await self._session.scalars(rows)).all()

    async def wrongly_metered(self) -> Sequence[tuple[str, str]]:
        """Usage rows of requests that did not complete, or are another tenant's or batch's."""
        rows = (
            select(UsageRecord.id, Request.state)
            .join(Request, Request.id == UsageRecord.request_id)
            .where(
                or_(
                    Request.state != "completed",
                    Request.tenant_id != UsageRecord.tenant_id,
                    func.coalesce(Request.batch_id, "") != func.coalesce(UsageRecord.batch_id, ""),
                    Request.price_id != UsageRecord.price_id,
                )
            )
            .order_by(UsageRecord.id)
        )
        return [(row[0], row[1]) for row in await self._session.execute(rows)]

    async def metered(self) -> AsyncIterator[tuple[UsageRecord, Price, dict[str, Any] | None]]:
        """Every usage row of a request, with its price and the body that was answered."""
        after = ""
        while True:
            rows = (
                select(UsageRecord, Price, Result.body)
                .join(Price, Price.id == UsageRecord.price_id)
                .outerjoin(Result, Result.request_id == UsageRecord.request_id)
                .where(UsageRecord.request_id.is_not(None), UsageRecord.id > after)
                .order_by(UsageRecord.id)
                .limit(_CHUNK)
            )
            found = (await self._session.execute(rows)).all()
            for record, price, body in found:
                yield record, price, body
            if len(found) < _CHUNK:
                return
            after = found[-1][0].id
            self._session.expunge_all()

    async def batches(self) -> Sequence[BatchTokens]:
        """What every batch counted, and the sum of its usage rows."""
        metered = (
            select(
                UsageRecord.batch_id,
                func.sum(UsageRecord.prompt_tokens).label("prompt"),
                func.sum(UsageRecord.cached_tokens).label("cached"),
                func.sum(UsageRecord.completion_tokens).label("completion"),
                func.count().label("requests"),
            )
            .where(UsageRecord.request_id.is_not(None), UsageRecord.batch_id.is_not(None))
            .group_by(UsageRecord.batch_id)
            .subquery()
        )
        sums = (metered.c.prompt, metered.c.cached, metered.c.completion, metered.c.requests)
        rows = select(Batch, *sums).outerjoin(metered, metered.c.batch_id == Batch.id)
        return [
            BatchTokens(
                batch.id,
                Tokens(batch.prompt_tokens, batch.cached_tokens, batch.completion_tokens),
                Tokens(*(int(value or 0) for value in row[:3])),
                batch.completed,
                int(row[3] or 0),
            )
            for batch, *row in await self._session.execute(rows.order_by(Batch.id))
        ]

    async def reservations(self) -> Sequence[tuple[str, int, int]]:
        """Accounts that do not hold what the tenant's open requests reserved: tenant, held, due."""
        open_sum = (
            select(Request.tenant_id, func.sum(Request.reserved_nano).label("due"))
            .where(is_open())
            .group_by(Request.tenant_id)
            .subquery()
        )
        due = cast(func.coalesce(open_sum.c.due, 0), BigInteger)
        rows = (
            select(Account.tenant_id, Account.reserved_nano, due)
            .outerjoin(open_sum, open_sum.c.tenant_id == Account.tenant_id)
            .where(Account.reserved_nano != due)
            .order_by(Account.tenant_id)
        )
        return [(row[0], row[1], row[2]) for row in await self._session.execute(rows)]

    async def spending(self) -> Sequence[tuple[str, str, int, int]]:
        """Accounts whose month is not the sum of its rows: tenant, month, spent, used."""
        accounts = (await self._session.scalars(select(Account).order_by(Account.tenant_id))).all()
        used = {month: await self._used(month) for month in {each.month for each in accounts}}
        return [
            (each.tenant_id, each.month, each.spent_nano, used[each.month].get(each.tenant_id, 0))
            for each in accounts
            if each.spent_nano != used[each.month].get(each.tenant_id, 0)
        ]

    async def hours(self) -> Sequence[tuple[str, int, str]]:
        """Hours whose sums are not those of their rows: tenant, the hour's beginning, model."""
        hour = UsageRecord.created_at - UsageRecord.created_at % HOUR_MS
        of_rows = select(
            UsageRecord.tenant_id,
            hour.label("created_at"),
            case((UsageRecord.request_id.is_(None), "correction"), else_="usage").label("kind"),
            UsageRecord.key_id,
            UsageRecord.model,
            func.coalesce(UsageRecord.adapter_revision_id, "").label("adapter_revision_id"),
            UsageRecord.request_class,
            UsageRecord.price_id,
            case((UsageRecord.request_id.is_(None), 0), else_=-1).label("requests"),
            -UsageRecord.prompt_tokens,
            -UsageRecord.cached_tokens,
            -UsageRecord.completion_tokens,
            -UsageRecord.amount_nano,
        )
        both = union_all(select(*UsageHour.__table__.columns), of_rows).subquery()
        keys = [both.c[column.name] for column in UsageHour.__table__.primary_key]
        sums = [column for column in both.c if column not in set(keys)]
        groups = (
            select(both.c.tenant_id, both.c.created_at, both.c.model)
            .group_by(*keys)
            .having(or_(*(func.sum(column) != 0 for column in sums)))
            .subquery()
        )
        wrong = select(groups).distinct().order_by(*groups.c)
        return [(row[0], row[1], row[2]) for row in await self._session.execute(wrong)]

    async def storage(self) -> Sequence[tuple[StorageRecord, StoragePrice]]:
        rows = select(StorageRecord, StoragePrice).join(
            StoragePrice, StoragePrice.id == StorageRecord.price_id
        )
        found = await self._session.execute(rows.order_by(StorageRecord.id))
        return [(row[0], row[1]) for row in found]

    async def invoices(self) -> Sequence[tuple[Invoice, int, int]]:
        """Invoices with the sums of their lines, exact and rounded."""
        sums = (_total(InvoiceLine.amount_nano), _total(InvoiceLine.amount_cents))
        rows = (
            select(Invoice, *sums)
            .outerjoin(InvoiceLine, InvoiceLine.invoice_id == Invoice.id)
            .group_by(Invoice.id)
            .order_by(Invoice.id)
        )
        return [(row[0], row[1], row[2]) for row in await self._session.execute(rows)]

    async def lines(self) -> Sequence[InvoiceLine]:
        rows = select(InvoiceLine).order_by(InvoiceLine.invoice_id, InvoiceLine.number)
        return (await self._session.scalars(rows)).all()

    async def months(self) -> Sequence[str]:
        """Those with invoices."""
        rows = select(Invoice.month).distinct().order_by(Invoice.month)
        return (await self._session.scalars(rows)).all()

    async def invoiced(self, month: str) -> Sequence[InvoicedMonth]:
        months = select(Invoice.tenant_id, func.max(Invoice.month)).group_by(Invoice.tenant_id)
        newest = {row[0]: row[1] for row in await self._session.execute(months)}
        lined = await self._session.execute(
            select(Invoice.tenant_id, _total(InvoiceLine.amount_nano))
            .join(InvoiceLine, InvoiceLine.invoice_id == Invoice.id)
            .where(InvoiceLine.period == month)
            .group_by(Invoice.tenant_id)
        )
        by_tenant, used = {row[0]: row[1] for row in lined}, await self._used(month)
        closed = await self._session.scalars(select(Invoice).where(Invoice.month == month))
        return [
            InvoicedMonth(
                invoice.id,
                used.get(invoice.tenant_id, 0),
                by_tenant.get(invoice.tenant_id, 0),
                newest[invoice.tenant_id] == month,
            )
            for invoice in closed
        ]

    async def _used(self, month: str) -> dict[str, int]:
        """Nanodollars by tenant; of the month "", of all time."""
        start, end = (start_of(month), end_of(month)) if month else (0, 2**62)
        used: dict[str, int] = defaultdict(int)
        for table in (UsageRecord, StorageRecord):
            rows = select(table.tenant_id, _total(table.amount_nano)).where(
                table.created_at >= start, table.created_at < end
            )
            for tenant_id, nano in await self._session.execute(rows.group_by(table.tenant_id)):
                used[tenant_id] += nano
        return used

    async def outputs(self) -> Sequence[tuple[Batch, File | None]]:
        """Ended batches with their output, unless its blob is gone."""
        rows = (
            select(Batch, File)
            .outerjoin(File, File.id == Batch.output_file_id)
            .where(Batch.status.in_(_ENDED), File.purged_at.is_(None))
            .order_by(Batch.id)
        )
        return [(row[0], row[1]) for row in await self._session.execute(rows)]


def _total(column: Any) -> ColumnElement[int]:
    return cast(func.coalesce(func.sum(column), 0), BigInteger)
