"""The initial schema, and the default prices: $0.10 per million prompt tokens, a quarter of that
for cached ones, $0.40 per million completion tokens, batches at half; adapters $0.10 per GiB and
month, by the hour."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

JSON = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")


def upgrade() -> None:
    create_tables()
    prices = sa.table(
        "prices",
        *(
            sa.column(name)
            for name in (
                "id",
                "model",
                "input_nano",
                "cached_nano",
                "output_nano",
                "batch_percent",
                "created_at",
            )
        ),
    )
    storage = sa.table("storage_prices", *map(sa.column, ("id", "gib_hour_nano", "created_at")))
    op.execute(storage.insert().values(("storage_price_default", 137_000, 0)))
    op.execute(prices.insert().values(("price_default", "*", 100, 25, 400, 50, 0)))


def create_tables() -> None:
    op.create_table(
        "base_models",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("source", sa.String(), nullable=False),
        sa.Column("context_tokens", sa.Integer(), nullable=False),
        sa.Column("limits", JSON, nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_base_models")),
    )
    op.create_table(
        "heartbeats",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_heartbeats")),
    )
    op.create_table(
        "prices",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("input_nano", sa.BigInteger(), nullable=False),
        sa.Column("cached_nano", sa.BigInteger(), nullable=False),
        sa.Column("output_nano", sa.BigInteger(), nullable=False),
        sa.Column("batch_percent", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_prices")),
    )
    op.create_index(op.f("ix_prices_model"), "prices", ["model"], unique=False)
    op.create_table(
        "tenants",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("limits", JSON, nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("suspended_at", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
        sa.UniqueConstraint("name", name=op.f("uq_tenants_name")),
    )
    op.create_table(
        "storage_prices",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("gib_hour_nano", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_storage_prices")),
    )
    op.create_table(
        "storage_records",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("price_id", sa.String(length=64), nullable=False),
        sa.Column("amount_nano", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["price_id"], ["storage_prices.id"], name=op.f("fk_storage_records_price_id")
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_storage_records_tenant_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_storage_records")),
        sa.UniqueConstraint(
            "tenant_id", "created_at", name=op.f("uq_storage_records_tenant_id_created_at")
        ),
    )
    op.create_table(
        "invoices",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("month", sa.String(), nullable=False),
        sa.Column("amount_nano", sa.BigInteger(), nullable=False),
        sa.Column("amount_cents", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_invoices_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_invoices")),
        sa.UniqueConstraint("tenant_id", "month", name=op.f("uq_invoices_tenant_id_month")),
    )
    op.create_table(
        "invoice_lines",
        sa.Column("invoice_id", sa.String(length=64), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("period", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("request_class", sa.String(), nullable=False),
        sa.Column("price_id", sa.String(), nullable=True),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("byte_hours", sa.BigInteger(), nullable=False),
        sa.Column("amount_nano", sa.BigInteger(), nullable=False),
        sa.Column("amount_cents", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["invoice_id"], ["invoices.id"], name=op.f("fk_invoice_lines_invoice_id")
        ),
        sa.PrimaryKeyConstraint("invoice_id", "number", name=op.f("pk_invoice_lines")),
    )
    op.create_table(
        "accounts",
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("reserved_nano", sa.BigInteger(), nullable=False),
        sa.Column("month", sa.String(), nullable=False),
        sa.Column("spent_nano", sa.BigInteger(), nullable=False),
        sa.Column("warned_month", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_accounts_tenant_id")),
        sa.PrimaryKeyConstraint("tenant_id", name=op.f("pk_accounts")),
    )
    op.create_table(
        "budgets",
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("month", sa.String(), nullable=False),
        sa.Column("soft_nano", sa.BigInteger(), nullable=True),
        sa.Column("hard_nano", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_budgets_tenant_id")),
        sa.PrimaryKeyConstraint("tenant_id", "month", name=op.f("pk_budgets")),
    )
    op.create_table(
        "adapters",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=True),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("promoted_revision_id", sa.String(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("deleted_at", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(
            ["base_model"], ["base_models.name"], name=op.f("fk_adapters_base_model")
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_adapters_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_adapters")),
    )
    op.create_index(
        "uq_adapters_tenant_name",
        "adapters",
        ["tenant_id", "name"],
        unique=True,
        sqlite_where=sa.text("deleted_at IS NULL"),
        postgresql_where=sa.text("deleted_at IS NULL"),
    )
    op.create_index(
        "uq_adapters_shared_name",
        "adapters",
        ["name"],
        unique=True,
        sqlite_where=sa.text("tenant_id IS NULL AND deleted_at IS NULL"),
        postgresql_where=sa.text("tenant_id IS NULL AND deleted_at IS NULL"),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=True),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("hash", sa.String(), nullable=False),
        sa.Column("hint", sa.String(), nullable=False),
        sa.Column("scopes", JSON, nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=True),
        sa.Column("revoked_at", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_api_keys_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("hash", name=op.f("uq_api_keys_hash")),
    )
    op.create_index(op.f("ix_api_keys_tenant_id"), "api_keys", ["tenant_id"], unique=False)
    op.create_table(
        "files",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("filename", sa.String(), nullable=False),
        sa.Column("purpose", sa.String(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("store_key", sa.String(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=True),
        sa.Column("deleted_at", sa.BigInteger(), nullable=True),
        sa.Column("purged_at", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_files_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_files")),
    )
    op.create_index(
        "ix_files_tenant_created", "files", ["tenant_id", "created_at", "id"], unique=False
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("owner", sa.String(length=64), nullable=False),
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("fingerprint", sa.String(), nullable=False),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("response", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("owner", "path", "key", name=op.f("pk_idempotency_keys")),
    )
    op.create_index(
        op.f("ix_idempotency_keys_created_at"), "idempotency_keys", ["created_at"], unique=False
    )
    op.create_table(
        "adapter_revisions",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("adapter_id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=True),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("digest", sa.String(), nullable=True),
        sa.Column("rank", sa.Integer(), nullable=True),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("upload_key", sa.String(), nullable=False),
        sa.Column("config", JSON, nullable=True),
        sa.Column("prompt_format", JSON, nullable=True),
        sa.Column("errors", JSON, nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("finished_at", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(
            ["adapter_id"], ["adapters.id"], name=op.f("fk_adapter_revisions_adapter_id")
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_adapter_revisions_tenant_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_adapter_revisions")),
        sa.UniqueConstraint(
            "adapter_id", "number", name=op.f("uq_adapter_revisions_adapter_id_number")
        ),
    )
    op.create_index(
        op.f("ix_adapter_revisions_digest"), "adapter_revisions", ["digest"], unique=False
    )
    op.create_table(
        "adapter_contents",
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("purging_at", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_adapter_contents")),
    )
    op.create_table(
        "adapter_grants",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("adapter_id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["adapter_id"], ["adapters.id"], name=op.f("fk_adapter_grants_adapter_id")
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_adapter_grants_tenant_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_adapter_grants")),
        sa.UniqueConstraint(
            "adapter_id", "tenant_id", name=op.f("uq_adapter_grants_adapter_id_tenant_id")
        ),
    )
    op.create_index(
        op.f("ix_adapter_grants_tenant_id"), "adapter_grants", ["tenant_id"], unique=False
    )
    op.create_table(
        "batches",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("key_id", sa.String(), nullable=False),
        sa.Column("endpoint", sa.String(), nullable=False),
        sa.Column("completion_window", sa.String(), nullable=False),
        sa.Column("on_invalid", sa.String(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("input_file_id", sa.String(length=64), nullable=False),
        sa.Column("output_file_id", sa.String(), nullable=True),
        sa.Column("error_file_id", sa.String(), nullable=True),
        sa.Column("output_expires_seconds", sa.Integer(), nullable=True),
        sa.Column("model", sa.String(), nullable=True),
        sa.Column("errors", JSON, nullable=True),
        sa.Column("user_metadata", JSON, nullable=True),
        sa.Column("validated_offset", sa.BigInteger(), nullable=False),
        sa.Column("validated_lines", sa.BigInteger(), nullable=False),
        sa.Column("total", sa.BigInteger(), nullable=False),
        sa.Column("completed", sa.BigInteger(), nullable=False),
        sa.Column("failed", sa.BigInteger(), nullable=False),
        sa.Column("cancelled", sa.BigInteger(), nullable=False),
        sa.Column("expired", sa.BigInteger(), nullable=False),
        sa.Column("enqueued_tokens", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.Column("in_progress_at", sa.BigInteger(), nullable=True),
        sa.Column("finalizing_at", sa.BigInteger(), nullable=True),
        sa.Column("completed_at", sa.BigInteger(), nullable=True),
        sa.Column("failed_at", sa.BigInteger(), nullable=True),
        sa.Column("expired_at", sa.BigInteger(), nullable=True),
        sa.Column("cancelling_at", sa.BigInteger(), nullable=True),
        sa.Column("cancelled_at", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(
            ["input_file_id"], ["files.id"], name=op.f("fk_batches_input_file_id")
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_batches_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batches")),
    )
    op.create_index(
        "ix_batches_open",
        "batches",
        ["status"],
        unique=False,
        sqlite_where=sa.text("status IN ('validating', 'in_progress', 'finalizing', 'cancelling')"),
        postgresql_where=sa.text(
            "status IN ('validating', 'in_progress', 'finalizing', 'cancelling')"
        ),
    )
    op.create_index(
        "ix_batches_tenant_created", "batches", ["tenant_id", "created_at", "id"], unique=False
    )
    op.create_table(
        "system_prompts",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("adapter_digest", sa.String(), nullable=True),
        sa.Column("text", sa.String(), nullable=True),
        sa.Column("messages", JSON, nullable=True),
        sa.Column("token_ids", JSON, nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("deleted_at", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(
            ["base_model"], ["base_models.name"], name=op.f("fk_system_prompts_base_model")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_system_prompts")),
    )
    op.create_table(
        "batch_models",
        sa.Column("batch_id", sa.String(length=64), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("enqueued_tokens", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["batch_id"], ["batches.id"], name=op.f("fk_batch_models_batch_id")
        ),
        sa.PrimaryKeyConstraint("batch_id", "model", name=op.f("pk_batch_models")),
    )
    op.create_table(
        "requests",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("key_id", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("batch_id", sa.String(length=64), nullable=True),
        sa.Column("line_no", sa.Integer(), nullable=True),
        sa.Column("custom_id", sa.String(), nullable=True),
        sa.Column("endpoint", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("adapter_revision_id", sa.String(length=64), nullable=True),
        sa.Column("request_class", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.String(), nullable=True),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("crashes", sa.Integer(), nullable=False),
        sa.Column("crashes_alone", sa.Integer(), nullable=False),
        sa.Column("suspects", sa.String(), nullable=True),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("max_tokens", sa.Integer(), nullable=False),
        sa.Column("sort_key", sa.String(), nullable=False),
        sa.Column("input_offset", sa.BigInteger(), nullable=True),
        sa.Column("input_length", sa.Integer(), nullable=True),
        sa.Column("body", JSON, nullable=True),
        sa.Column("user_metadata", JSON, nullable=True),
        sa.Column("price_id", sa.String(length=64), nullable=False),
        sa.Column("reserved_nano", sa.BigInteger(), nullable=False),
        sa.Column("webhook_endpoint_id", sa.String(), nullable=True),
        sa.Column("webhook_url", sa.String(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("deadline_at", sa.BigInteger(), nullable=True),
        sa.Column("dispatched_at", sa.BigInteger(), nullable=True),
        sa.Column("started_at", sa.BigInteger(), nullable=True),
        sa.Column("finished_at", sa.BigInteger(), nullable=True),
        sa.Column("cancel_requested_at", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(
            ["adapter_revision_id"],
            ["adapter_revisions.id"],
            name=op.f("fk_requests_adapter_revision_id"),
        ),
        sa.ForeignKeyConstraint(
            ["base_model"], ["base_models.name"], name=op.f("fk_requests_base_model")
        ),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name=op.f("fk_requests_batch_id")),
        sa.ForeignKeyConstraint(["price_id"], ["prices.id"], name=op.f("fk_requests_price_id")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_requests_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_requests")),
        sa.UniqueConstraint("batch_id", "custom_id", name=op.f("uq_requests_batch_id_custom_id")),
        sa.UniqueConstraint("batch_id", "line_no", name=op.f("uq_requests_batch_id_line_no")),
    )
    op.create_index("ix_requests_batch_state", "requests", ["batch_id", "state"], unique=False)
    op.create_index(
        "ix_requests_dispatched",
        "requests",
        ["base_model", "tenant_id", "request_class", "dispatched_at"],
        unique=False,
        sqlite_where=sa.text("state IN ('dispatched', 'running')"),
        postgresql_where=sa.text("state IN ('dispatched', 'running')"),
    )
    op.create_index(
        "ix_requests_jobs",
        "requests",
        ["tenant_id", "created_at", "id"],
        unique=False,
        sqlite_where=sa.text("kind = 'job'"),
        postgresql_where=sa.text("kind = 'job'"),
    )
    op.create_index(
        "ix_requests_open_jobs",
        "requests",
        ["tenant_id"],
        unique=False,
        sqlite_where=sa.text("kind = 'job' AND state IN ('queued', 'dispatched', 'running')"),
        postgresql_where=sa.text("kind = 'job' AND state IN ('queued', 'dispatched', 'running')"),
    )
    op.create_index(
        "ix_requests_open_deadline",
        "requests",
        ["deadline_at"],
        unique=False,
        sqlite_where=sa.text("state IN ('queued', 'dispatched', 'running')"),
        postgresql_where=sa.text("state IN ('queued', 'dispatched', 'running')"),
    )
    op.create_index(
        "ix_requests_queued",
        "requests",
        ["base_model", "tenant_id", "request_class", "sort_key", "id"],
        unique=False,
        sqlite_where=sa.text("state = 'queued'"),
        postgresql_where=sa.text("state = 'queued'"),
    )
    op.create_table(
        "results",
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.Column("status_code", sa.Integer(), nullable=True),
        sa.Column("body", JSON, nullable=True),
        sa.Column("error", JSON, nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["request_id"], ["requests.id"], name=op.f("fk_results_request_id")
        ),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_results")),
    )
    op.create_table(
        "usage_records",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("request_id", sa.String(length=64), nullable=True),
        sa.Column("corrects_id", sa.String(length=64), nullable=True),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("key_id", sa.String(), nullable=False),
        sa.Column("batch_id", sa.String(length=64), nullable=True),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("adapter_revision_id", sa.String(), nullable=True),
        sa.Column("request_class", sa.String(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("price_id", sa.String(length=64), nullable=False),
        sa.Column("amount_nano", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.String(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["batch_id"], ["batches.id"], name=op.f("fk_usage_records_batch_id")
        ),
        sa.ForeignKeyConstraint(
            ["corrects_id"], ["usage_records.id"], name=op.f("fk_usage_records_corrects_id")
        ),
        sa.ForeignKeyConstraint(
            ["price_id"], ["prices.id"], name=op.f("fk_usage_records_price_id")
        ),
        sa.ForeignKeyConstraint(
            ["request_id"], ["requests.id"], name=op.f("fk_usage_records_request_id")
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_usage_records_tenant_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_usage_records")),
        sa.UniqueConstraint("request_id", name=op.f("uq_usage_records_request_id")),
    )
    op.create_index(op.f("ix_usage_records_batch_id"), "usage_records", ["batch_id"], unique=False)
    op.create_index(
        "ix_usage_records_corrections",
        "usage_records",
        ["corrects_id"],
        unique=False,
        sqlite_where=sa.text("corrects_id IS NOT NULL"),
        postgresql_where=sa.text("corrects_id IS NOT NULL"),
    )
    op.create_index(
        "ix_usage_records_tenant_created",
        "usage_records",
        ["tenant_id", "created_at"],
        unique=False,
    )
    op.create_table(
        "usage_hours",
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("key_id", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("adapter_revision_id", sa.String(), nullable=False),
        sa.Column("request_class", sa.String(), nullable=False),
        sa.Column("price_id", sa.String(length=64), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("amount_nano", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["price_id"], ["prices.id"], name=op.f("fk_usage_hours_price_id")),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_usage_hours_tenant_id")
        ),
        sa.PrimaryKeyConstraint(
            "tenant_id",
            "created_at",
            "kind",
            "key_id",
            "model",
            "adapter_revision_id",
            "request_class",
            "price_id",
            name=op.f("pk_usage_hours"),
        ),
    )

    op.create_table(
        "webhook_endpoints",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("url", sa.String(), nullable=False),
        sa.Column("event_types", JSON, nullable=True),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("failing_since", sa.BigInteger(), nullable=True),
        sa.Column("paused_until", sa.BigInteger(), nullable=True),
        sa.Column("disabled_at", sa.BigInteger(), nullable=True),
        sa.Column("disabled_reason", sa.String(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.Column("deleted_at", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_webhook_endpoints_tenant_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_endpoints")),
    )
    op.create_index(
        "ix_webhook_endpoints_registered",
        "webhook_endpoints",
        ["tenant_id", "created_at", "id"],
        unique=False,
        sqlite_where=sa.text("kind = 'endpoint' AND deleted_at IS NULL"),
        postgresql_where=sa.text("kind = 'endpoint' AND deleted_at IS NULL"),
    )
    op.create_index(
        "uq_webhook_endpoints_origin",
        "webhook_endpoints",
        ["tenant_id", "url"],
        unique=True,
        sqlite_where=sa.text("kind = 'origin'"),
        postgresql_where=sa.text("kind = 'origin'"),
    )
    op.create_table(
        "webhook_events",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("type", sa.String(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_webhook_events_tenant_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_events")),
    )
    op.create_index("ix_webhook_events_created", "webhook_events", ["created_at"], unique=False)
    op.create_index(
        "ix_webhook_events_tenant_created",
        "webhook_events",
        ["tenant_id", "created_at", "id"],
        unique=False,
    )
    op.create_table(
        "webhook_deliveries",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("event_id", sa.String(length=64), nullable=False),
        sa.Column("endpoint_id", sa.String(length=64), nullable=False),
        sa.Column("url", sa.String(), nullable=True),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("next_attempt_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("finished_at", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(
            ["endpoint_id"],
            ["webhook_endpoints.id"],
            name=op.f("fk_webhook_deliveries_endpoint_id"),
        ),
        sa.ForeignKeyConstraint(
            ["event_id"], ["webhook_events.id"], name=op.f("fk_webhook_deliveries_event_id")
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_webhook_deliveries_tenant_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_deliveries")),
        sa.UniqueConstraint(
            "event_id", "endpoint_id", name=op.f("uq_webhook_deliveries_event_id_endpoint_id")
        ),
    )
    op.create_index(
        "ix_webhook_deliveries_due",
        "webhook_deliveries",
        ["endpoint_id", "next_attempt_at"],
        unique=False,
        sqlite_where=sa.text("state = 'pending'"),
        postgresql_where=sa.text("state = 'pending'"),
    )
    op.create_index(
        "ix_webhook_deliveries_expiry",
        "webhook_deliveries",
        ["expires_at"],
        unique=False,
        sqlite_where=sa.text("state = 'pending'"),
        postgresql_where=sa.text("state = 'pending'"),
    )
    op.create_table(
        "webhook_secrets",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("endpoint_id", sa.String(length=64), nullable=True),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("hint", sa.String(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(
            ["endpoint_id"], ["webhook_endpoints.id"], name=op.f("fk_webhook_secrets_endpoint_id")
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_webhook_secrets_tenant_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_secrets")),
    )
    op.create_index(
        "ix_webhook_secrets_owner", "webhook_secrets", ["tenant_id", "endpoint_id"], unique=False
    )
    op.create_index(
        "uq_webhook_secrets_current",
        "webhook_secrets",
        ["endpoint_id"],
        unique=True,
        sqlite_where=sa.text("endpoint_id IS NOT NULL AND expires_at IS NULL"),
        postgresql_where=sa.text("endpoint_id IS NOT NULL AND expires_at IS NULL"),
    )
    op.create_index(
        "uq_webhook_secrets_current_default",
        "webhook_secrets",
        ["tenant_id"],
        unique=True,
        sqlite_where=sa.text("endpoint_id IS NULL AND expires_at IS NULL"),
        postgresql_where=sa.text("endpoint_id IS NULL AND expires_at IS NULL"),
    )
    op.create_table(
        "webhook_attempts",
        sa.Column("delivery_id", sa.String(length=64), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("duration_ms", sa.BigInteger(), nullable=False),
        sa.Column("status_code", sa.Integer(), nullable=True),
        sa.Column("error", sa.String(), nullable=True),
        sa.ForeignKeyConstraint(
            ["delivery_id"], ["webhook_deliveries.id"], name=op.f("fk_webhook_attempts_delivery_id")
        ),
        sa.PrimaryKeyConstraint("delivery_id", "number", name=op.f("pk_webhook_attempts")),
    )


def downgrade() -> None:
    op.drop_table("webhook_attempts")
    op.drop_index(
        "uq_webhook_secrets_current_default",
        table_name="webhook_secrets",
        sqlite_where=sa.text("endpoint_id IS NULL AND expires_at IS NULL"),
        postgresql_where=sa.text("endpoint_id IS NULL AND expires_at IS NULL"),
    )
    op.drop_index(
        "uq_webhook_secrets_current",
        table_name="webhook_secrets",
        sqlite_where=sa.text("endpoint_id IS NOT NULL AND expires_at IS NULL"),
        postgresql_where=sa.text("endpoint_id IS NOT NULL AND expires_at IS NULL"),
    )
    op.drop_index("ix_webhook_secrets_owner", table_name="webhook_secrets")
    op.drop_table("webhook_secrets")
    op.drop_index(
        "ix_webhook_deliveries_expiry",
        table_name="webhook_deliveries",
        sqlite_where=sa.text("state = 'pending'"),
        postgresql_where=sa.text("state = 'pending'"),
    )
    op.drop_index(
        "ix_webhook_deliveries_due",
        table_name="webhook_deliveries",
        sqlite_where=sa.text("state = 'pending'"),
        postgresql_where=sa.text("state = 'pending'"),
    )
    op.drop_table("webhook_deliveries")
    op.drop_index("ix_webhook_events_tenant_created", table_name="webhook_events")
    op.drop_index("ix_webhook_events_created", table_name="webhook_events")
    op.drop_table("webhook_events")
    op.drop_index(
        "uq_webhook_endpoints_origin",
        table_name="webhook_endpoints",
        sqlite_where=sa.text("kind = 'origin'"),
        postgresql_where=sa.text("kind = 'origin'"),
    )
    op.drop_index(
        "ix_webhook_endpoints_registered",
        table_name="webhook_endpoints",
        sqlite_where=sa.text("kind = 'endpoint' AND deleted_at IS NULL"),
        postgresql_where=sa.text("kind = 'endpoint' AND deleted_at IS NULL"),
    )
    op.drop_table("webhook_endpoints")
    op.drop_table("usage_hours")
    op.drop_index(
        "ix_usage_records_corrections",
        table_name="usage_records",
        sqlite_where=sa.text("corrects_id IS NOT NULL"),
        postgresql_where=sa.text("corrects_id IS NOT NULL"),
    )
    op.drop_index("ix_usage_records_tenant_created", table_name="usage_records")
    op.drop_index(op.f("ix_usage_records_batch_id"), table_name="usage_records")
    op.drop_table("usage_records")
    op.drop_table("results")
    op.drop_index(
        "ix_requests_queued",
        table_name="requests",
        sqlite_where=sa.text("state = 'queued'"),
        postgresql_where=sa.text("state = 'queued'"),
    )
    op.drop_index(
        "ix_requests_open_deadline",
        table_name="requests",
        sqlite_where=sa.text("state IN ('queued', 'dispatched', 'running')"),
        postgresql_where=sa.text("state IN ('queued', 'dispatched', 'running')"),
    )
    op.drop_index(
        "ix_requests_open_jobs",
        table_name="requests",
        sqlite_where=sa.text("kind = 'job' AND state IN ('queued', 'dispatched', 'running')"),
        postgresql_where=sa.text("kind = 'job' AND state IN ('queued', 'dispatched', 'running')"),
    )
    op.drop_index(
        "ix_requests_jobs",
        table_name="requests",
        sqlite_where=sa.text("kind = 'job'"),
        postgresql_where=sa.text("kind = 'job'"),
    )
    op.drop_index(
        "ix_requests_dispatched",
        table_name="requests",
        sqlite_where=sa.text("state IN ('dispatched', 'running')"),
        postgresql_where=sa.text("state IN ('dispatched', 'running')"),
    )
    op.drop_index("ix_requests_batch_state", table_name="requests")
    op.drop_table("requests")
    op.drop_index("ix_batches_tenant_created", table_name="batches")
    op.drop_index(
        "ix_batches_open",
        table_name="batches",
        sqlite_where=sa.text("status IN ('validating', 'in_progress', 'finalizing', 'cancelling')"),
        postgresql_where=sa.text(
            "status IN ('validating', 'in_progress', 'finalizing', 'cancelling')"
        ),
    )
    op.drop_table("batch_models")
    op.drop_table("system_prompts")
    op.drop_table("batches")
    op.drop_index(op.f("ix_adapter_grants_tenant_id"), table_name="adapter_grants")
    op.drop_table("adapter_grants")
    op.drop_table("adapter_contents")
    op.drop_index(op.f("ix_adapter_revisions_digest"), table_name="adapter_revisions")
    op.drop_table("adapter_revisions")
    op.drop_index(op.f("ix_idempotency_keys_created_at"), table_name="idempotency_keys")
    op.drop_table("idempotency_keys")
    op.drop_index("ix_files_tenant_created", table_name="files")
    op.drop_table("files")
    op.drop_index(op.f("ix_api_keys_tenant_id"), table_name="api_keys")
    op.drop_table("api_keys")
    op.drop_index(
        "uq_adapters_shared_name",
        table_name="adapters",
        sqlite_where=sa.text("tenant_id IS NULL AND deleted_at IS NULL"),
        postgresql_where=sa.text("tenant_id IS NULL AND deleted_at IS NULL"),
    )
    op.drop_index(
        "uq_adapters_tenant_name",
        table_name="adapters",
        sqlite_where=sa.text("deleted_at IS NULL"),
        postgresql_where=sa.text("deleted_at IS NULL"),
    )
    op.drop_table("adapters")
    op.drop_table("invoice_lines")
    op.drop_table("invoices")
    op.drop_table("storage_records")
    op.drop_table("storage_prices")
    op.drop_table("budgets")
    op.drop_table("accounts")
    op.drop_table("tenants")
    op.drop_index(op.f("ix_prices_model"), table_name="prices")
    op.drop_table("prices")
    op.drop_table("heartbeats")
    op.drop_table("base_models")
