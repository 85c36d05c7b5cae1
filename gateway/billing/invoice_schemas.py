"""Invoices on the wire: exact amounts in nanodollars, and what is due in cents."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway.billing.service import dollars
from gateway.kit.months import end_of, start_of
from gateway.models import Invoice, InvoiceLine, StoragePrice, UsageRecord

_GIB = 2**30


class InvoiceLineObject(BaseModel):
    """`period` is the month of the usage; a line of kind `late` is what an earlier month's invoice
    did not have yet, one of kind `correction` what operators took back or added."""

    number: int
    period: str
    kind: Literal["usage", "correction", "storage", "late"]
    description: str
    model: str | None
    request_class: str | None = Field(serialization_alias="class")
    price_id: str | None
    requests: int
    input_tokens: int
    cached_input_tokens: int
    output_tokens: int
    gib_hours: str | None
    amount_nano: int
    exact_amount: str
    amount: str = Field(description="Dollars, rounded to cents")


class InvoiceSummary(BaseModel):
    """A draft grows until its month is closed. `amount` is the sum of its lines' rounded ones."""

    id: str
    object: Literal["invoice"] = "invoice"
    status: Literal["draft", "final"]
    month: str
    period_start: int
    period_end: int
    currency: Literal["usd"] = "usd"
    finalized_at: int | None
    amount_nano: int
    exact_amount: str
    amount: str


class InvoiceObject(InvoiceSummary):
    lines: list[InvoiceLineObject]


class Correct(BaseModel):
    model_config = ConfigDict(extra="forbid")

    request_id: str
    amount_nano: int = Field(ge=-(10**18), le=10**18, description="Negative gives money back")
    reason: str = Field(min_length=1, max_length=512, pattern=r"^[^\x00-\x1f]+$")


class CorrectionObject(BaseModel):
    id: str
    object: Literal["correction"] = "correction"
    corrects: str
    tenant_id: str
    model: str
    amount_nano: int
    amount: str
    reason: str | None
    created_at: int


class SetStoragePrice(BaseModel):
    model_config = ConfigDict(extra="forbid")

    gib_hour_nano: int = Field(ge=0, le=10**15, description="Nanodollars per GiB and hour")


class StoragePriceObject(SetStoragePrice):
    id: str
    object: Literal["storage_price"] = "storage_price"
    created_at: int


def show_invoice(invoice: Invoice, lines: Sequence[InvoiceLine], is_final: bool) -> InvoiceObject:
    summary = show_summary(invoice, is_final).model_dump()
    return InvoiceObject(**summary, lines=[_show_line(line) for line in lines])


def show_summary(invoice: Invoice, is_final: bool = True) -> InvoiceSummary:
    return InvoiceSummary(
        id=invoice.id,
        status="final" if is_final else "draft",
        month=invoice.month,
        period_start=start_of(invoice.month) // 1000,
        period_end=end_of(invoice.month) // 1000,
        finalized_at=invoice.created_at // 1000 if is_final else None,
        amount_nano=invoice.amount_nano,
        exact_amount=dollars(invoice.amount_nano),
        amount=_rounded(invoice.amount_cents),
    )


def invoice_csv(invoice: InvoiceObject) -> str:
    """A header, and a row for each line."""
    out = io.StringIO()
    names = ["invoice", "status", *InvoiceLineObject.model_fields]
    writer = csv.DictWriter(out, names, lineterminator="\r\n")
    writer.writeheader()
    for line in invoice.lines:
        row = {"invoice": invoice.id, "status": invoice.status, **line.model_dump()}
        writer.writerow(row)
    return out.getvalue()


def show_correction(row: UsageRecord) -> CorrectionObject:
    return CorrectionObject(
        id=row.id,
        corrects=row.corrects_id or "",
        tenant_id=row.tenant_id,
        model=row.model,
        amount_nano=row.amount_nano,
        amount=dollars(row.amount_nano),
        reason=row.reason,
        created_at=row.created_at // 1000,
    )


def show_storage_price(price: StoragePrice) -> StoragePriceObject:
    return StoragePriceObject(
        id=price.id, gib_hour_nano=price.gib_hour_nano, created_at=price.created_at // 1000
    )


def _show_line(line: InvoiceLine) -> InvoiceLineObject:
    gib_hours = None
    if line.kind == "storage":
        gib_hours = f"{line.byte_hours / _GIB:.6f}"
    return InvoiceLineObject(
        number=line.number,
        period=line.period,
        kind=line.kind,  # type: ignore[arg-type]
        description=_description(line),
        model=line.model or None,
        request_class=line.request_class or None,
        price_id=line.price_id,
        requests=line.requests,
        input_tokens=line.prompt_tokens,
        cached_input_tokens=line.cached_tokens,
        output_tokens=line.completion_tokens,
        gib_hours=gib_hours,
        amount_nano=line.amount_nano,
        exact_amount=dollars(line.amount_nano),
        amount=_rounded(line.amount_cents),
    )


def _description(line: InvoiceLine) -> str:
    match line.kind:
        case "storage":
            return "Adapter storage"
        case "late":
            return f"Usage of {line.period} recorded after its invoice"
        case "correction":
            return f"Corrections of {line.model}, {line.request_class}"
        case _:
            return f"{line.model}, {line.request_class}"


def _rounded(cents: int) -> str:
    sign, amount = ("-" if cents < 0 else ""), abs(cents)
    return f"{sign}{amount // 100}.{amount % 100:02d}"
