"""Jobs on the wire."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway.jobs.generation import Endpoint
from gateway.jobs.states import public_state
from gateway.jobs.storable import Metadata
from gateway.kit.clock import seconds
from gateway.models import Request, Result

JobStatus = Literal["queued", "running", "completed", "failed", "cancelled", "expired"]
Priority = Literal["standard", "batch"]


class CreateJob(BaseModel):
    """`priority` "batch" costs less and yields to everything else. `deadline` is Unix seconds:
    a job that has not finished by then expires. `webhook` is told of its end: the id of an
    endpoint, or a URL, for which the tenant's default secret signs."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "example": {
                "endpoint": "/v1/chat/completions",
                "body": {
                    "model": "smollm2-135m-instruct",
                    "messages": [{"role": "user", "content": "Hello!"}],
                },
                "priority": "batch",
            }
        },
    )

    endpoint: Endpoint
    body: dict[str, Any]
    metadata: Metadata | None = None
    priority: Priority = "standard"
    deadline: int | None = Field(None, ge=0, le=2**40)
    webhook: str | None = Field(None, min_length=1, max_length=2048)


class JobResponse(BaseModel):
    """What the synchronous endpoint would have answered."""

    status_code: int
    body: dict[str, Any]


class JobError(BaseModel):
    code: str
    message: str


class JobObject(BaseModel):
    """`response` is set once it is completed or failed; `error` when no response exists."""

    id: str
    object: Literal["job"] = "job"
    endpoint: str
    model: str
    status: JobStatus
    priority: str
    created_at: int
    started_at: int | None
    finished_at: int | None
    deadline: int | None
    prompt_tokens: int
    metadata: dict[str, str] | None
    webhook: str | None
    response: JobResponse | None
    error: JobError | None


def job_object(row: Request, result: Result | None) -> JobObject:
    response = error = None
    if result is not None and result.status_code is not None:
        response = JobResponse(status_code=result.status_code, body=result.body or {})
    elif result is not None and result.error is not None:
        error = JobError.model_validate(result.error)
    return JobObject(
        id=row.id,
        endpoint=row.endpoint,
        model=row.model,
        status=public_state(row.state),  # type: ignore[arg-type]
        priority=row.request_class,
        created_at=row.created_at // 1000,
        started_at=seconds(row.started_at),
        finished_at=seconds(row.finished_at),
        deadline=seconds(row.deadline_at),
        prompt_tokens=row.prompt_tokens,
        metadata=row.user_metadata,
        webhook=row.webhook_url or row.webhook_endpoint_id,
        response=response,
        error=error,
    )
