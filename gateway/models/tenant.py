from __future__ import annotations

from typing import Literal

from sqlalchemy import JSON, ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column

from gateway.models.base import Base, Id, JsonObject, Ms


class Tenant(Base):
    """Who pays, and whose limits apply. `weight` is the fair share in the queue."""

    __tablename__ = "tenants"

    id: Mapped[Id]
    name: Mapped[str] = mapped_column(unique=True)
    weight: Mapped[float] = mapped_column(default=1.0)
    limits: Mapped[JsonObject] = mapped_column(default=dict)
    created_at: Mapped[Ms]
    suspended_at: Mapped[Ms | None]


class ApiKey(Base):
    """A secret, kept as sha256 (they are 256 random bits). An operator's key has no tenant."""

    __tablename__ = "api_keys"

    id: Mapped[Id]
    tenant_id: Mapped[str | None] = mapped_column(ForeignKey("tenants.id"), index=True)
    name: Mapped[str]
    hash: Mapped[str] = mapped_column(unique=True)
    hint: Mapped[str]
    scopes: Mapped[list[str]] = mapped_column(type_=Base.type_annotation_map[JsonObject])
    created_at: Mapped[Ms]
    expires_at: Mapped[Ms | None]
    revoked_at: Mapped[Ms | None]

    def state(self, now: int) -> Literal["active", "expired", "revoked"]:
        """At `now`, in milliseconds."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and self.expires_at <= now else "active"


class IdempotencyKey(Base):
    """The first answer to a POST, given again to the same key and body. `owner` is a tenant's id,
    or stands for the operators. `path` is its digest. `response` holds no secret, and keeps the
    order of its keys, as JSONB would not."""

    __tablename__ = "idempotency_keys"

    owner: Mapped[str] = mapped_column(String(64), primary_key=True)
    path: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    fingerprint: Mapped[str]
    status: Mapped[int | None]
    response: Mapped[JsonObject | None] = mapped_column(JSON(none_as_null=True))
    created_at: Mapped[Ms] = mapped_column(index=True)
