from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKey, Index, Text, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from gateway.models.base import Base, Count, Id, Ms

_PENDING = text("state = 'pending'")
_REGISTERED = text("kind = 'endpoint' AND deleted_at IS NULL")
_ORIGIN = text("kind = 'origin'")
_CURRENT = text("endpoint_id IS NOT NULL AND expires_at IS NULL")
_CURRENT_DEFAULT = text("endpoint_id IS NULL AND expires_at IS NULL")


class WebhookEndpoint(Base):
    """Where a tenant's events go.

    Kind `endpoint` is registered and chooses its `event_types` (null: all). Kind `origin` stands
    for the scheme, host and port of URLs that jobs name; no client sees it. `failures` in a row,
    the first one at `failing_since`, open the circuit breaker: nothing is sent before
    `paused_until`.
    """

    __tablename__ = "webhook_endpoints"
    __table_args__ = (
        Index(
            "ix_webhook_endpoints_registered",
            "tenant_id",
            "created_at",
            "id",
            sqlite_where=_REGISTERED,
            postgresql_where=_REGISTERED,
        ),
        Index(
            "uq_webhook_endpoints_origin",
            "tenant_id",
            "url",
            unique=True,
            sqlite_where=_ORIGIN,
            postgresql_where=_ORIGIN,
        ),
    )

    id: Mapped[Id]
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    kind: Mapped[str] = mapped_column(default="endpoint")
    name: Mapped[str] = mapped_column(default="")
    url: Mapped[str]
    event_types: Mapped[list[Any] | None]
    failures: Mapped[int] = mapped_column(default=0)
    failing_since: Mapped[Ms | None]
    paused_until: Mapped[Ms | None]
    disabled_at: Mapped[Ms | None]
    disabled_reason: Mapped[str | None]
    created_at: Mapped[Ms]
    updated_at: Mapped[Ms]
    deleted_at: Mapped[Ms | None]


class WebhookSecret(Base):
    """Names a signing secret, which is derived from the deployment's key and this id: the
    database holds none. `digest` proves that the right key was used. Without an endpoint it is
    the tenant's default, which signs for URLs that jobs name. One is current (`expires_at` null);
    the one before lives on while receivers change over."""

    __tablename__ = "webhook_secrets"
    __table_args__ = (
        Index(
            "uq_webhook_secrets_current",
            "endpoint_id",
            unique=True,
            sqlite_where=_CURRENT,
            postgresql_where=_CURRENT,
        ),
        Index(
            "uq_webhook_secrets_current_default",
            "tenant_id",
            unique=True,
            sqlite_where=_CURRENT_DEFAULT,
            postgresql_where=_CURRENT_DEFAULT,
        ),
        Index("ix_webhook_secrets_owner", "tenant_id", "endpoint_id"),
    )

    id: Mapped[Id]
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    endpoint_id: Mapped[str | None] = mapped_column(ForeignKey("webhook_endpoints.id"))
    digest: Mapped[str]
    hint: Mapped[str]
    created_at: Mapped[Ms]
    expires_at: Mapped[Ms | None]


class WebhookEvent(Base):
    """Something that happened to a tenant's object. `body` is what is sent, byte for byte, at
    every attempt; `id` is the message's `webhook-id`."""

    __tablename__ = "webhook_events"
    __table_args__ = (
        Index("ix_webhook_events_tenant_created", "tenant_id", "created_at", "id"),
        Index("ix_webhook_events_created", "created_at"),
    )

    id: Mapped[Id]
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    type: Mapped[str]
    body: Mapped[str] = mapped_column(Text)
    created_at: Mapped[Ms]


class WebhookDelivery(Base):
    """An event on its way to one endpoint: pending → delivered | failed.

    To claim it is to count an attempt and to move `next_attempt_at` a lease ahead: what a crash
    leaves behind comes due by itself. `attempts` numbers all attempts, `tries` those since it was
    last scheduled. At `expires_at` it fails, tried or not. `url` overrides the endpoint's.
    """

    __tablename__ = "webhook_deliveries"
    __table_args__ = (
        UniqueConstraint("event_id", "endpoint_id"),
        Index(
            "ix_webhook_deliveries_due",
            "endpoint_id",
            "next_attempt_at",
            sqlite_where=_PENDING,
            postgresql_where=_PENDING,
        ),
        Index(
            "ix_webhook_deliveries_expiry",
            "expires_at",
            sqlite_where=_PENDING,
            postgresql_where=_PENDING,
        ),
    )

    id: Mapped[Id]
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    event_id: Mapped[str] = mapped_column(ForeignKey("webhook_events.id"))
    endpoint_id: Mapped[str] = mapped_column(ForeignKey("webhook_endpoints.id"))
    url: Mapped[str | None]
    state: Mapped[str] = mapped_column(default="pending")
    attempts: Mapped[int] = mapped_column(default=0)
    tries: Mapped[int] = mapped_column(default=0)
    next_attempt_at: Mapped[Ms]
    expires_at: Mapped[Ms]
    created_at: Mapped[Ms]
    finished_at: Mapped[Ms | None]


class WebhookAttempt(Base):
    """What became of one attempt: the receiver's status, or an error when there was none."""

    __tablename__ = "webhook_attempts"

    delivery_id: Mapped[str] = mapped_column(ForeignKey("webhook_deliveries.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[Ms]
    duration_ms: Mapped[Count]
    status_code: Mapped[int | None]
    error: Mapped[str | None]
