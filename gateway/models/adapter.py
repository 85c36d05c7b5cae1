from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKey, Index, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from gateway.models.base import Base, Count, Id, JsonObject, Ms


class BaseModel(Base):
    """A base model that this deployment serves, by the name that clients use.

    `source` is a local folder or hub id. `limits` are the last ones a worker announced, kept so
    that jobs can be accepted while no worker is up; null until the first announcement.
    """

    __tablename__ = "base_models"

    name: Mapped[str] = mapped_column(primary_key=True)
    source: Mapped[str]
    context_tokens: Mapped[int]
    limits: Mapped[JsonObject | None]
    created_at: Mapped[Ms]


class Adapter(Base):
    """A named LoRA; `promoted_revision_id` answers to the bare name.

    Without a tenant it is the operator's: shared with the tenants it is granted to.
    """

    __tablename__ = "adapters"
    __table_args__ = (
        Index(
            "uq_adapters_tenant_name",
            "tenant_id",
            "name",
            unique=True,
            sqlite_where=text("deleted_at IS NULL"),
            postgresql_where=text("deleted_at IS NULL"),
        ),
        Index(
            "uq_adapters_shared_name",
            "name",
            unique=True,
            sqlite_where=text("tenant_id IS NULL AND deleted_at IS NULL"),
            postgresql_where=text("tenant_id IS NULL AND deleted_at IS NULL"),
        ),
    )

    id: Mapped[Id]
    tenant_id: Mapped[str | None] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str]
    base_model: Mapped[str] = mapped_column(ForeignKey("base_models.name"))
    promoted_revision_id: Mapped[str | None]
    created_at: Mapped[Ms]
    deleted_at: Mapped[Ms | None]


class AdapterGrant(Base):
    """A tenant may use a shared adapter."""

    __tablename__ = "adapter_grants"
    __table_args__ = (UniqueConstraint("adapter_id", "tenant_id"),)

    id: Mapped[Id]
    adapter_id: Mapped[str] = mapped_column(ForeignKey("adapters.id"))
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    created_at: Mapped[Ms]


class AdapterContent(Base):
    """Files in the object store, adapters/{digest}/, of all revisions that have this content,
    whoever's they are. `purging_at`: a sweep is removing them."""

    __tablename__ = "adapter_contents"

    digest: Mapped[str] = mapped_column(primary_key=True)
    created_at: Mapped[Ms]
    purging_at: Mapped[Ms | None]


class AdapterRevision(Base):
    """One immutable upload: validating → ready | rejected. `digest` is its content's sha256, set
    before files are written (see AdapterContent). `prompt_format` is what its
    tokenizer files change about prompts (`gateway.adapters.prompt_files.PromptFormat`)."""

    __tablename__ = "adapter_revisions"
    __table_args__ = (UniqueConstraint("adapter_id", "number"),)

    id: Mapped[Id]
    adapter_id: Mapped[str] = mapped_column(ForeignKey("adapters.id"))
    tenant_id: Mapped[str | None] = mapped_column(ForeignKey("tenants.id"))
    number: Mapped[int]
    status: Mapped[str]
    digest: Mapped[str | None] = mapped_column(index=True)
    rank: Mapped[int | None]
    bytes: Mapped[Count]
    upload_key: Mapped[str]
    config: Mapped[JsonObject | None]
    prompt_format: Mapped[JsonObject | None]
    errors: Mapped[list[Any] | None]
    created_at: Mapped[Ms]
    finished_at: Mapped[Ms | None]
