"""Settings of the gateway's processes: read once at start, frozen, passed down.

Environment variables are `BATTEN_*`, plus `DATABASE_URL` and `REDIS_URL`; command-line flags
override them. Every limit has its default here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AliasChoices, BeforeValidator, Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

DEFAULT_DATA = Path("~/.local/share/batten").expanduser()

LogLevel = Literal["DEBUG", "INFO", "WARN", "WARNING", "ERROR", "CRITICAL"]


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="BATTEN_",
        env_ignore_empty=True,
        frozen=True,
        populate_by_name=True,
        extra="ignore",
    )

    data: Path = Field(DEFAULT_DATA, description="Data directory of embedded servers and files")
    database_url: SecretStr | None = Field(
        None, validation_alias="DATABASE_URL", description="Default: SQLite in the data directory"
    )
    redis_url: SecretStr | None = Field(
        None, validation_alias="REDIS_URL", description="Default: embedded server of `batten up`"
    )
    store: str | None = Field(
        None, description="Object store, file:///dir or s3://bucket; default: in the data directory"
    )
    store_seconds: float = Field(
        30.0, gt=0, description="Longest request to the object store, and all retries of it"
    )
    redis_connections: int = Field(
        64, ge=4, description="Most connections to Redis for a process's commands"
    )
    host: str = Field("127.0.0.1", description="Address the API listens on")
    port: int = Field(8400, ge=0, le=65535, description="Port the API listens on")
    admin_key: SecretStr | None = Field(None, description="Key of the operator")
    model: str | None = Field(None, description="Base model: a local folder or a hub id")
    model_name: str | None = Field(
        None, description="Name that clients use; default: the folder's or repository's name"
    )

    queue_window: int = Field(
        1000, ge=1, description="Most requests in Redis per tenant, model and class"
    )
    max_attempts: int = Field(
        3, ge=1, description="Crashes of a worker with one request alone, before it fails"
    )
    lease_seconds: float = Field(
        60.0, gt=0, description="What a dead worker or collector held goes to another after so long"
    )
    silent_seconds: float = Field(
        30.0, gt=0, description="Work on a batch that says nothing for so long is begun again"
    )
    default_max_tokens: int = Field(1024, ge=1, description="max_tokens when a body names none")
    generation_config: Literal["auto", "neutral"] = Field(
        "auto",
        description="Sampling parameters that a request leaves out: auto takes the base model's "
        "generation_config.json, neutral never; the same in every process",
    )
    file_bytes: int = Field(200 * 2**20, ge=1, description="Largest uploaded file")
    batch_lines: int = Field(50_000, ge=1, description="Most lines of a batch")
    line_bytes: int = Field(2**20, ge=1, description="Longest line of a batch file")
    batch_errors: int = Field(1000, ge=1, description="Most errors listed of an invalid batch")
    custom_id_chars: int = Field(512, ge=1, description="Longest custom_id")
    body_bytes: int = Field(4 * 2**20, ge=1, description="Largest JSON body of a call")
    adapter_bytes: int = Field(2 * 2**30, ge=1, description="Largest adapter upload")
    template_chars: int = Field(
        256 * 2**10, ge=1, description="Longest chat template of an adapter"
    )
    template_seconds: float = Field(
        1.0, gt=0, description="Longest that an adapter's chat template may take for one prompt"
    )
    enqueued_tokens: int = Field(
        200_000_000, ge=1, description="Most prompt tokens of a tenant and model waiting in batches"
    )
    invoice_delay_hours: int = Field(
        24, ge=0, description="Hours from the end of a month until its invoices are closed"
    )
    batches_per_hour: int = Field(2000, ge=1, description="Most batches a tenant creates an hour")
    tenant_adapters: int = Field(1000, ge=1, description="Most adapters of a tenant")
    tenant_adapter_bytes: int = Field(
        100 * 2**30, ge=1, description="Most bytes of a tenant's adapters, all revisions together"
    )
    deleted_adapter_hours: int = Field(
        1, ge=0, description="Hours until files of a deleted adapter leave the store"
    )
    file_days: int = Field(30, ge=1, description="Days until an uploaded batch file expires")
    idempotency_hours: int = Field(
        24, ge=1, description="Hours for which an Idempotency-Key gives its first answer again"
    )
    long_poll_seconds: float = Field(60.0, gt=0, description="Longest wait of a long poll")
    sync_seconds: float = Field(600.0, gt=0, description="Longest synchronous call")
    secret_key: SecretStr | None = Field(
        None,
        min_length=32,
        description="Key that webhook secrets, and new API keys that are shown again, are "
        "derived from, the same in every process; "
        "default: made in the data directory",
    )
    webhook_allow_private: bool = Field(
        False, description="Let webhooks reach private addresses, and http://"
    )
    webhook_endpoints: int = Field(20, ge=1, description="Most webhook endpoints of a tenant")
    webhook_timeout_seconds: float = Field(
        15.0, gt=0, le=25, description="Longest attempt to deliver a webhook, all in all"
    )
    webhook_concurrency: int = Field(
        64, ge=1, le=1000, description="Most webhooks on their way at once, per delivery task"
    )
    webhook_tenant_concurrency: int = Field(16, ge=1, description="… of one tenant")
    webhook_endpoint_concurrency: int = Field(4, ge=1, description="… to one endpoint")
    webhook_failures: int = Field(
        5, ge=1, description="Failures in a row after which an endpoint is left alone for a while"
    )
    webhook_event_days: int = Field(30, ge=5, description="Days until events are forgotten")
    log_level: Annotated[LogLevel, BeforeValidator(str.upper)] = Field(
        "INFO",
        validation_alias=AliasChoices("BATTEN_LOG_LEVEL", "LOG_LEVEL"),
        description="Least severe log lines to write: DEBUG, INFO, WARNING, ERROR or CRITICAL",
    )

    @property
    def effective_database_url(self) -> str:
        if self.database_url is not None:
            return self.database_url.get_secret_value()
        return f"sqlite:///{self.data.absolute() / 'batten.db'}"

    @property
    def effective_store(self) -> str:
        return self.store or f"file://{self.data.absolute() / 'store'}"
