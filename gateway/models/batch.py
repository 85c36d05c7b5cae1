from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKey, Index, text
from sqlalchemy.orm import Mapped, mapped_column

from gateway.models.base import Base, Count, Id, JsonObject, Ms

_OPEN = "status IN ('validating', 'in_progress', 'finalizing', 'cancelling')"


class BatchModel(Base):
    """Prompt tokens that wait of one model, in a batch that asks for several (`model` null)."""

    __tablename__ = "batch_models"

    batch_id: Mapped[str] = mapped_column(ForeignKey("batches.id"), primary_key=True)
    model: Mapped[str] = mapped_column(primary_key=True)
    enqueued_tokens: Mapped[Count]


class Batch(Base):
    """Many requests from one input file (status transitions: `gateway.batches.state`).

    `validated_*` is how far validation has come, which expands each good line into a held
    request as it goes, so that it resumes after a crash. Counts change in the transaction that
    changes the rows they count.
    """

    __tablename__ = "batches"
    __table_args__ = (
        Index("ix_batches_tenant_created", "tenant_id", "created_at", "id"),
        Index("ix_batches_open", "status", sqlite_where=text(_OPEN), postgresql_where=text(_OPEN)),
    )

    id: Mapped[Id]
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    key_id: Mapped[str]
    endpoint: Mapped[str]
    completion_window: Mapped[str]
    on_invalid: Mapped[str] = mapped_column(default="fail")
    status: Mapped[str] = mapped_column(default="validating")
    input_file_id: Mapped[str] = mapped_column(ForeignKey("files.id"))
    output_file_id: Mapped[str | None]
    error_file_id: Mapped[str | None]
    output_expires_seconds: Mapped[int | None]
    model: Mapped[str | None]
    errors: Mapped[list[Any] | None]
    user_metadata: Mapped[JsonObject | None]
    validated_offset: Mapped[Count]
    validated_lines: Mapped[Count]
    total: Mapped[Count]
    completed: Mapped[Count]
    failed: Mapped[Count]
    cancelled: Mapped[Count]
    expired: Mapped[Count]
    enqueued_tokens: Mapped[Count]
    prompt_tokens: Mapped[Count]
    cached_tokens: Mapped[Count]
    completion_tokens: Mapped[Count]
    created_at: Mapped[Ms]
    expires_at: Mapped[Ms]
    in_progress_at: Mapped[Ms | None]
    finalizing_at: Mapped[Ms | None]
    completed_at: Mapped[Ms | None]
    failed_at: Mapped[Ms | None]
    expired_at: Mapped[Ms | None]
    cancelling_at: Mapped[Ms | None]
    cancelled_at: Mapped[Ms | None]
