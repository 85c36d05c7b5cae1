"""Batches on the wire: OpenAI's fields, and two counts of our own (`cancelled`, `expired`)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway.batches.state import BatchStatus
from gateway.jobs.storable import Metadata
from gateway.kit.clock import seconds
from gateway.models import Batch


class OutputExpiry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2_592_000)


class InlineRequest(BaseModel):
    """A line without a file; `method` and `url` are the batch's when left out."""

    model_config = ConfigDict(extra="forbid", strict=True)

    custom_id: str
    body: dict[str, Any]
    method: str = "POST"
    url: str | None = None


class CreateBatch(BaseModel):
    """Either `input_file_id` or `requests`. With `on_invalid` "skip" bad lines go to the error
    file and the rest runs."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "example": {
                "endpoint": "/v1/chat/completions",
                "completion_window": "24h",
                "input_file_id": "file_01jd3v5x8y2k4m6n8p0q2r4s6t",
            }
        },
    )

    endpoint: str
    completion_window: str
    input_file_id: str | None = None
    requests: list[InlineRequest] | None = None
    metadata: Metadata | None = None
    output_expires_after: OutputExpiry | None = None
    on_invalid: Literal["fail", "skip"] = "fail"


class RetryBatch(BaseModel):
    """What is not given is as in the batch that is retried."""

    model_config = ConfigDict(extra="forbid", strict=True)

    completion_window: str | None = None
    metadata: Metadata | None = None


class BatchErrorObject(BaseModel):
    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchErrorObject]


class BatchEstimate(BaseModel):
    """Tokens and amounts of the valid lines. `max_*`: every answer as long as it may be and
    nothing cached; `expected_*`: as long as your recent answers. `expected_finish_at` (Unix
    seconds) is null when you have had no answers of the model in 24 hours. `complete` is false
    when the file was too long to read whole: then the numbers are projected from its start."""

    object: Literal["batch.estimate"] = "batch.estimate"
    complete: bool
    requests: int
    invalid_requests: int
    errors: list[BatchErrorObject] = Field(description="The first of them")
    prompt_tokens: int
    max_completion_tokens: int
    expected_completion_tokens: int
    max_amount: str = Field(description="Dollars")
    max_amount_nano: int
    expected_amount: str = Field(description="Dollars")
    expected_amount_nano: int
    expected_finish_at: int | None


class RequestCounts(BaseModel):
    """completed + failed + cancelled + expired = total once the batch has ended."""

    total: int
    completed: int
    failed: int
    cancelled: int
    expired: int


class InputTokensDetails(BaseModel):
    cached_tokens: int


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int = 0


class BatchUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class BatchObject(BaseModel):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    on_invalid: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None


def show_batch(row: Batch) -> BatchObject:
    shown_errors = None
    if row.errors:
        shown_errors = BatchErrors(data=[BatchErrorObject(**error) for error in row.errors])
    return BatchObject(
        id=row.id,
        endpoint=row.endpoint,
        model=row.model,
        errors=shown_errors,
        input_file_id=row.input_file_id,
        completion_window=row.completion_window,
        on_invalid=row.on_invalid,
        status=row.status,  # type: ignore[arg-type]
        output_file_id=row.output_file_id,
        error_file_id=row.error_file_id,
        created_at=row.created_at // 1000,
        request_counts=_counts(row),
        usage=_usage(row),
        metadata=row.user_metadata,
        **_times(row),
    )


def _times(row: Batch) -> dict[str, Any]:
    names = (
        "in_progress_at",
        "expires_at",
        "finalizing_at",
        "completed_at",
        "failed_at",
        "expired_at",
        "cancelling_at",
        "cancelled_at",
    )
    return {name: seconds(getattr(row, name)) for name in names}


def _counts(row: Batch) -> RequestCounts:
    if row.status == "validating":
        return RequestCounts(total=0, completed=0, failed=0, cancelled=0, expired=0)
    return RequestCounts(
        total=row.total,
        completed=row.completed,
        failed=row.failed,
        cancelled=row.cancelled,
        expired=row.expired,
    )


def _usage(row: Batch) -> BatchUsage:
    return BatchUsage(
        input_tokens=row.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=row.cached_tokens),
        output_tokens=row.completion_tokens,
        output_tokens_details=OutputTokensDetails(),
        total_tokens=row.prompt_tokens + row.completion_tokens,
    )
