from __future__ import annotations

from sqlalchemy import BigInteger, ForeignKey, Index, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from gateway.models.base import Base, Count, Id, Ms


class Price(Base):
    """One version of a model's price, in integer nanodollars per token; never updated.

    `batch_percent` is what batch-class work costs of the full price. `model` is a base model's
    or adapter's name, "*" for all.
    """

    __tablename__ = "prices"

    id: Mapped[Id]
    model: Mapped[str] = mapped_column(index=True)
    input_nano: Mapped[int] = mapped_column(BigInteger)
    cached_nano: Mapped[int] = mapped_column(BigInteger)
    output_nano: Mapped[int] = mapped_column(BigInteger)
    batch_percent: Mapped[int] = mapped_column(default=50)
    created_at: Mapped[Ms]


class UsageRecord(Base):
    """What one request used and costs: append-only, at most one per request. A correction is
    another row (`request_id` null) that names the row it corrects, and a `reason`."""

    __tablename__ = "usage_records"
    __table_args__ = (
        Index("ix_usage_records_tenant_created", "tenant_id", "created_at"),
        Index(
            "ix_usage_records_corrections",
            "corrects_id",
            sqlite_where=text("corrects_id IS NOT NULL"),
            postgresql_where=text("corrects_id IS NOT NULL"),
        ),
    )

    id: Mapped[Id]
    request_id: Mapped[str | None] = mapped_column(ForeignKey("requests.id"), unique=True)
    corrects_id: Mapped[str | None] = mapped_column(ForeignKey("usage_records.id"))
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    key_id: Mapped[str]
    batch_id: Mapped[str | None] = mapped_column(ForeignKey("batches.id"), index=True)
    model: Mapped[str]
    base_model: Mapped[str]
    adapter_revision_id: Mapped[str | None]
    request_class: Mapped[str]
    prompt_tokens: Mapped[Count]
    cached_tokens: Mapped[Count]
    completion_tokens: Mapped[Count]
    price_id: Mapped[str] = mapped_column(ForeignKey("prices.id"))
    amount_nano: Mapped[Count]
    reason: Mapped[str | None]
    created_at: Mapped[Ms]


class UsageHour(Base):
    """The sum of one hour's usage rows that are alike; `created_at` begins it. Kind `usage` is of
    requests, `correction` of corrections, which are no `requests`. Booked with the rows
    (`gateway.billing.booking`). `adapter_revision_id` is "" for the base model: a key has no nulls.
    """

    __tablename__ = "usage_hours"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    created_at: Mapped[Ms] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    key_id: Mapped[str] = mapped_column(primary_key=True)
    model: Mapped[str] = mapped_column(primary_key=True)
    adapter_revision_id: Mapped[str] = mapped_column(primary_key=True)
    request_class: Mapped[str] = mapped_column(primary_key=True)
    price_id: Mapped[str] = mapped_column(ForeignKey("prices.id"), primary_key=True)
    requests: Mapped[Count]
    prompt_tokens: Mapped[Count]
    cached_tokens: Mapped[Count]
    completion_tokens: Mapped[Count]
    amount_nano: Mapped[Count]


class StoragePrice(Base):
    """One version of what a GiB of adapters costs for an hour; never updated."""

    __tablename__ = "storage_prices"

    id: Mapped[Id]
    gib_hour_nano: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[Ms]


class StorageRecord(Base):
    """What a tenant's adapters took for one hour, which `created_at` begins: one row an hour."""

    __tablename__ = "storage_records"
    __table_args__ = (UniqueConstraint("tenant_id", "created_at"),)

    id: Mapped[Id]
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    bytes: Mapped[Count]
    price_id: Mapped[str] = mapped_column(ForeignKey("storage_prices.id"))
    amount_nano: Mapped[Count]
    created_at: Mapped[Ms]
