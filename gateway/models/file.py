from __future__ import annotations

from sqlalchemy import ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from gateway.models.base import Base, Count, Id, Ms


class File(Base):
    """A blob in the object store under `store_key`. Deletion hides it from the tenant at once;
    the blob goes when no live batch reads it any more (a sweep)."""

    __tablename__ = "files"
    __table_args__ = (Index("ix_files_tenant_created", "tenant_id", "created_at", "id"),)

    id: Mapped[Id]
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    filename: Mapped[str]
    purpose: Mapped[str]
    bytes: Mapped[Count]
    store_key: Mapped[str]
    created_at: Mapped[Ms]
    expires_at: Mapped[Ms | None]
    deleted_at: Mapped[Ms | None]
    purged_at: Mapped[Ms | None]
