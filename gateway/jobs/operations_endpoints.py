from __future__ import annotations

import base64
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel

from gateway.auth.dependencies import AdminPrincipal
from gateway.jobs import operations
from gateway.kit.dependencies import AppContext

router = APIRouter(prefix="/v1/admin", tags=["admin"])


class DepthObject(BaseModel):
    ready: int
    leased: int


class QueueObject(BaseModel):
    """`counters`: virtual tokens of the tenants that wait; the lowest is served next."""

    object: Literal["queue"] = "queue"
    model: str
    classes: dict[str, DepthObject]
    counters: dict[str, dict[str, float]]


class QueueList(BaseModel):
    object: Literal["list"] = "list"
    data: list[QueueObject]


class DeadLetterObject(BaseModel):
    """`data`: the bytes as they were received, in base 64. `request_id` is None for an event."""

    object: Literal["dead_letter"] = "dead_letter"
    id: str
    model: str
    kind: Literal["request", "event"]
    request_id: str | None
    reason: str
    data: str


class DeadLetterList(BaseModel):
    object: Literal["list"] = "list"
    data: list[DeadLetterObject]


class RequeuedObject(BaseModel):
    object: Literal["request.requeued"] = "request.requeued"
    request_id: str


@router.get("/queue")
async def queue(context: AppContext, operator: AdminPrincipal) -> QueueList:
    """What waits and runs in each model's queue, and whose turn it is."""
    return QueueList(
        data=[
            QueueObject(
                model=model,
                classes={
                    name: DepthObject(ready=depth.ready, leased=depth.leased)
                    for name, depth in classes.items()
                },
                counters=await operations.counters(context, model),
            )
            for model, classes in (await operations.depths(context)).items()
        ]
    )


@router.get("/dead_letters")
async def dead_letters(
    context: AppContext,
    operator: AdminPrincipal,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> DeadLetterList:
    """Requests and events that this release could not read, each model's newest first."""
    return DeadLetterList(
        data=[
            DeadLetterObject(
                id=letter.entry_id,
                model=model,
                kind=letter.kind,
                request_id=letter.request_id or None,
                reason=letter.reason,
                data=base64.b64encode(letter.data).decode(),
            )
            for model, letter in await operations.dead_letters(context, limit)
        ]
    )


@router.post("/dead_letters/{request_id}/requeue", status_code=202)
async def requeue(request_id: str, context: AppContext, operator: AdminPrincipal) -> RequeuedObject:
    """Run a request again that no worker could read, with its next attempt."""
    await operations.requeue_dead(context, request_id)
    return RequeuedObject(request_id=request_id)
