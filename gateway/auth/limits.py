"""What a tenant may ask for at most."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Most = Annotated[int, Field(ge=1, le=10**12)]


class Limits(BaseModel):
    """Requests and tokens are those of synchronous calls and jobs; a request counts its prompt
    and `max_tokens` of every choice. Null for batches, enqueued tokens and adapters is what the
    deployment's settings say, else no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests_per_minute: Most | None = None
    tokens_per_minute: Most | None = None
    batches_per_hour: Most | None = None
    enqueued_tokens: Most | None = Field(
        default=None, description="Prompt tokens of a model that wait in batches"
    )
    adapters: Most | None = None
    adapter_bytes: Most | None = Field(default=None, description="Of all revisions together")
    concurrent_jobs: Most | None = Field(default=None, description="Jobs that have not ended")


UNLIMITED = Limits()
