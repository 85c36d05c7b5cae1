from __future__ import annotations

from sqlalchemy import ForeignKey, Integer, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from gateway.models.base import Base, Count, Id, Ms


class Invoice(Base):
    """A tenant's month, closed: its row is inserted once and never changes. A month without one
    is a draft, computed when it is asked for."""

    __tablename__ = "invoices"
    __table_args__ = (UniqueConstraint("tenant_id", "month"),)

    id: Mapped[Id]
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    month: Mapped[str]
    amount_nano: Mapped[Count]
    amount_cents: Mapped[Count]
    created_at: Mapped[Ms]


class InvoiceLine(Base):
    """What one model, class and price came to. `period` is the month of the usage: an earlier one
    when it was recorded after that month's invoice. `amount_cents` is `amount_nano`, rounded."""

    __tablename__ = "invoice_lines"

    invoice_id: Mapped[str] = mapped_column(ForeignKey("invoices.id"), primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True)
    period: Mapped[str]
    kind: Mapped[str]
    model: Mapped[str] = mapped_column(default="")
    request_class: Mapped[str] = mapped_column(default="")
    price_id: Mapped[str | None]
    requests: Mapped[Count]
    prompt_tokens: Mapped[Count]
    cached_tokens: Mapped[Count]
    completion_tokens: Mapped[Count]
    byte_hours: Mapped[Count]
    amount_nano: Mapped[Count]
    amount_cents: Mapped[Count]
