from __future__ import annotations

from sqlalchemy import BigInteger, ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from gateway.models.base import Base, Count, Ms


class Account(Base):
    """A tenant's running sums in nanodollars, one row each.

    `reserved_nano`: the most that its open requests may cost. `spent_nano`: what was used in
    `month` ("2026-11"), the newest in which anything was. `warned_month`: the last month whose
    soft budget was told to be reached.
    """

    __tablename__ = "accounts"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    reserved_nano: Mapped[Count]
    month: Mapped[str] = mapped_column(default="")
    spent_nano: Mapped[Count]
    warned_month: Mapped[str] = mapped_column(default="")


class Budget(Base):
    """What a tenant wants or may spend in a month; `month` "*" is every month without its own.
    Null is no limit."""

    __tablename__ = "budgets"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    month: Mapped[str] = mapped_column(primary_key=True)
    soft_nano: Mapped[int | None] = mapped_column(BigInteger)
    hard_nano: Mapped[int | None] = mapped_column(BigInteger)
    created_at: Mapped[Ms]
