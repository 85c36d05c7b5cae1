from __future__ import annotations

from sqlalchemy import ColumnElement, ForeignKey, Index, UniqueConstraint, literal_column, text
from sqlalchemy.orm import Mapped, mapped_column

from gateway.models.base import Base, Count, Id, JsonObject, Ms

_QUEUED = "state = 'queued'"
_OUT = "state IN ('dispatched', 'running')"
_OPEN = "state IN ('queued', 'dispatched', 'running')"


def is_queued() -> ColumnElement[bool]:
    """Like those below it is literal SQL, the condition of partial indices: a bound parameter
    would keep SQLite and Postgres from using them."""
    return literal_column(f"requests.{_QUEUED}")


def is_out() -> ColumnElement[bool]:
    """In the queue or on a worker."""
    return literal_column(f"requests.{_OUT}")


def is_open() -> ColumnElement[bool]:
    return literal_column(f"requests.{_OPEN}")


class Request(Base):
    """One generation: a job, a synchronous call, or one line of a batch.

        held → queued ⇄ dispatched → running → completed | failed | cancelled | expired

    `attempt` grows with each dispatch; an event of an older attempt changes nothing.
    `epoch` names the life of Redis it was dispatched in. `failures` counts answers that
    another attempt may better, `crashes` lost leases,
    `crashes_alone` those while nothing else ran, `suspects` names whom it may run with after
    one (`gateway.collector.suspects`). `body` holds a job's body; a batch line's lies
    in the input file at [input_offset, input_offset + input_length). `sort_key` groups lines
    that share a prefix. The seed, the adapter revision and the price are pinned at submission.
    `reserved_nano` is the most it may cost: part of the tenant's account while it is open (not
    while it is held). `webhook_*` say who is told of a job's end. `deadline_at` is when it expires.
    """

    __tablename__ = "requests"
    __table_args__ = (
        UniqueConstraint("batch_id", "line_no"),
        UniqueConstraint("batch_id", "custom_id"),
        Index(
            "ix_requests_queued",
            "base_model",
            "tenant_id",
            "request_class",
            "sort_key",
            "id",
            sqlite_where=text(_QUEUED),
            postgresql_where=text(_QUEUED),
        ),
        Index(
            "ix_requests_dispatched",
            "base_model",
            "tenant_id",
            "request_class",
            "dispatched_at",
            sqlite_where=text(_OUT),
            postgresql_where=text(_OUT),
        ),
        Index(
            "ix_requests_jobs",
            "tenant_id",
            "created_at",
            "id",
            sqlite_where=text("kind = 'job'"),
            postgresql_where=text("kind = 'job'"),
        ),
        Index(
            "ix_requests_open_jobs",
            "tenant_id",
            sqlite_where=text(f"kind = 'job' AND {_OPEN}"),
            postgresql_where=text(f"kind = 'job' AND {_OPEN}"),
        ),
        Index(
            "ix_requests_open_deadline",
            "deadline_at",
            sqlite_where=text(_OPEN),
            postgresql_where=text(_OPEN),
        ),
        Index("ix_requests_batch_state", "batch_id", "state"),
    )

    id: Mapped[Id]
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    key_id: Mapped[str]
    kind: Mapped[str]
    batch_id: Mapped[str | None] = mapped_column(ForeignKey("batches.id"))
    line_no: Mapped[int | None]
    custom_id: Mapped[str | None]
    endpoint: Mapped[str]
    model: Mapped[str]
    base_model: Mapped[str] = mapped_column(ForeignKey("base_models.name"))
    adapter_revision_id: Mapped[str | None] = mapped_column(ForeignKey("adapter_revisions.id"))
    request_class: Mapped[str]
    state: Mapped[str] = mapped_column(default="queued")
    attempt: Mapped[int] = mapped_column(default=0)
    epoch: Mapped[str | None]
    failures: Mapped[int] = mapped_column(default=0)
    crashes: Mapped[int] = mapped_column(default=0)
    crashes_alone: Mapped[int] = mapped_column(default=0)
    suspects: Mapped[str | None]
    seed: Mapped[Count]
    prompt_tokens: Mapped[int]
    max_tokens: Mapped[int]
    sort_key: Mapped[str] = mapped_column(default="")
    input_offset: Mapped[Count | None]
    input_length: Mapped[int | None]
    body: Mapped[JsonObject | None]
    user_metadata: Mapped[JsonObject | None]
    price_id: Mapped[str] = mapped_column(ForeignKey("prices.id"))
    reserved_nano: Mapped[Count]
    webhook_endpoint_id: Mapped[str | None]
    webhook_url: Mapped[str | None]
    created_at: Mapped[Ms]
    deadline_at: Mapped[Ms | None]
    dispatched_at: Mapped[Ms | None]
    started_at: Mapped[Ms | None]
    finished_at: Mapped[Ms | None]
    cancel_requested_at: Mapped[Ms | None]


class Result(Base):
    """The answer to a request, exactly one: an OpenAI body with its HTTP status, or, when no
    response exists (expired, cancelled), `error` alone."""

    __tablename__ = "results"

    request_id: Mapped[str] = mapped_column(ForeignKey("requests.id"), primary_key=True)
    status_code: Mapped[int | None]
    body: Mapped[JsonObject | None]
    error: Mapped[JsonObject | None]
    created_at: Mapped[Ms]
