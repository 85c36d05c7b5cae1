"""Invoices: a draft while the month runs, closed once by a control task.

    Σ lines of a month  =  Σ usage rows and storage rows of that month

Amounts are exact in nanodollars; each line is rounded to cents once, and the total is the sum of
what was rounded. What is recorded after its month was closed is a line of the next invoice.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict

from gateway.auth.scope import TenantScope, scope_for_background
from gateway.billing.invoice_repository import InvoiceRepository, Sum, uninvoiced
from gateway.billing.storage import metered_until
from gateway.errors import NotFound
from gateway.kit.clock import now_ms
from gateway.kit.context import Context
from gateway.kit.database import ReadSession, WriteSession
from gateway.kit.months import MONTH, end_of, month_of, months_later
from gateway.kit.sql import insert_ignoring
from gateway.models import Invoice, InvoiceLine
from gateway.webhooks.service import record

LOOKBACK_MONTHS = 3
"""How long after a month something of it may be recorded."""

_CENT = 10**7
_TENANTS_AT_ONCE = 200
_ID = re.compile(rf"invoice_({MONTH})_([0-9a-z]+)")


def cents(nano: int) -> int:
    """Half a cent is rounded away from zero."""
    whole = (abs(nano) + _CENT // 2) // _CENT
    return -whole if nano < 0 else whole


def invoice_id(tenant_id: str, month: str) -> str:
    """The same for the draft and the invoice that is made of it."""
    return f"invoice_{month}_{tenant_id.rpartition('_')[2]}"


async def find_invoice(
    session: ReadSession, scope: TenantScope, id: str
) -> tuple[Invoice, Sequence[InvoiceLine], bool]:
    """The invoice, its lines, and whether it is closed. Raises NotFound."""
    named = _ID.fullmatch(id)
    repository = InvoiceRepository(session, scope)
    if named is not None and id == invoice_id(scope.tenant_id, named[1]):
        invoice = await repository.get(named[1])
        if invoice is not None:
            return invoice, await repository.lines(invoice), True
        if named[1] in await draft_months(repository):
            return *await draft(repository, scope.tenant_id, named[1]), False
    raise NotFound(f"No invoice found with id '{id}'.", param="id")


async def draft_months(repository: InvoiceRepository) -> list[str]:
    """The running month, and those before it that are not closed yet; newest first."""
    this_month = month_of(now_ms())
    months = [this_month]
    for ago in range(1, LOOKBACK_MONTHS + 1):
        month = months_later(this_month, -ago)
        if await repository.get(month) is None and await repository.was_active(month):
            months.append(month)
    return months


async def draft(
    repository: InvoiceRepository, tenant_id: str, month: str
) -> tuple[Invoice, list[InvoiceLine]]:
    """As it would be closed now. Nothing is added to the session."""
    named = invoice_id(tenant_id, month)
    lines = [_line(named, month, of) for of in await repository.usage(month)]
    lines += [_line(named, month, of) for of in await repository.storage(month)]
    for ago in range(1, LOOKBACK_MONTHS + 1):
        earlier = months_later(month, -ago)
        if await repository.get(earlier) is None:
            continue
        if late := await repository.late(earlier):
            lines.append(_line(named, earlier, Sum("late", "", "", None, late)))
    for number, line in enumerate(lines, 1):
        line.number = number
    invoice = Invoice(
        id=named,
        tenant_id=tenant_id,
        month=month,
        amount_nano=sum(line.amount_nano for line in lines),
        amount_cents=sum(line.amount_cents for line in lines),
        created_at=now_ms(),
    )
    return invoice, lines


async def close_invoices(context: Context) -> int:
    """Closes the months that ended long enough ago and are metered, the oldest first. Returns
    how many invoices were made."""
    delay = context.settings.invoice_delay_hours * 3_600_000
    closed = min(now_ms() - delay, await metered_until(context))
    made = 0
    for ago in range(LOOKBACK_MONTHS, 0, -1):
        month = months_later(month_of(now_ms()), -ago)
        if end_of(month) <= closed:
            made += await close_month(context, month)
    return made


async def close_month(context: Context, month: str) -> int:
    """Invoices of all tenants that used something lately, one transaction each."""
    made = 0
    since = months_later(month, -LOOKBACK_MONTHS)
    while True:
        async with context.database.read() as session:
            tenant_ids = await uninvoiced(session, month, since, _TENANTS_AT_ONCE)
        for tenant_id in tenant_ids:
            async with context.database.write() as session:
                made += await _close(session, tenant_id, month)
        if len(tenant_ids) < _TENANTS_AT_ONCE:
            return made


async def _close(session: WriteSession, tenant_id: str, month: str) -> bool:
    """False when it was closed before: the row is inserted once."""
    statement = insert_ignoring(session, Invoice).values(
        id=invoice_id(tenant_id, month),
        tenant_id=tenant_id,
        month=month,
        amount_nano=0,
        amount_cents=0,
        created_at=now_ms(),
    )
    won = await session.scalar(statement.returning(Invoice.id))
    if won is None:
        return False
    repository = InvoiceRepository(session, scope_for_background(tenant_id))
    computed, lines = await draft(repository, tenant_id, month)
    invoice = await session.get_one(Invoice, won)
    invoice.amount_nano, invoice.amount_cents = computed.amount_nano, computed.amount_cents
    session.add_all(lines)
    await record(session, tenant_id, "invoice.finalized", {"id": invoice.id})
    return True


def _line(invoice_id: str, period: str, of: Sum) -> InvoiceLine:
    return InvoiceLine(
        invoice_id=invoice_id, period=period, amount_cents=cents(of.amount_nano), **asdict(of)
    )
