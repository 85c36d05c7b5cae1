from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse, StreamingResponse

from gateway.auth.dependencies import CurrentPrincipal
from gateway.auth.idempotency import CurrentOnce
from gateway.batches import service
from gateway.batches.creation import Creation
from gateway.batches.estimate import estimate
from gateway.batches.finaliser import SUCCEEDED, UNSUCCESSFUL, result_lines
from gateway.batches.repository import BatchRepository
from gateway.batches.retry import retried
from gateway.batches.schemas import (
    BatchEstimate,
    BatchObject,
    CreateBatch,
    RetryBatch,
    show_batch,
)
from gateway.batches.state import TERMINAL
from gateway.kit.dependencies import AppContext, AppTasks
from gateway.kit.pagination import ListObject, PageRequest, list_object, paging
from gateway.kit.task_names import FINALIZE
from gateway.tenants.admission import CurrentAdmission

router = APIRouter(prefix="/v1/batches", tags=["batches"])


@router.post("", response_model=BatchObject)
async def create_batch(
    wanted: CreateBatch,
    context: AppContext,
    tasks: AppTasks,
    principal: CurrentPrincipal,
    once: CurrentOnce,
    admission: CurrentAdmission,
) -> JSONResponse:
    """Create a batch from an uploaded file, or from `requests` in the body."""
    service.check_create(wanted)
    if (earlier := await once.earlier()) is not None:
        return earlier
    inline = None
    if wanted.requests is not None:
        inline = await service.inline_file(context, principal.scope, wanted)
    work = Creation(context, tasks, principal, once, admission)
    return await work.create(wanted, inline)


@router.post("/estimate")
async def estimate_batch(
    wanted: CreateBatch, context: AppContext, principal: CurrentPrincipal
) -> BatchEstimate:
    """What the batch would cost, and when it would end. Nothing is stored."""
    service.check_create(wanted)
    return await estimate(context, principal, wanted)


@router.post("/{batch_id}/retry", response_model=BatchObject)
async def retry_batch(
    batch_id: str,
    context: AppContext,
    tasks: AppTasks,
    principal: CurrentPrincipal,
    once: CurrentOnce,
    admission: CurrentAdmission,
    wanted: RetryBatch | None = None,
) -> JSONResponse:
    """A new batch of the lines that failed, expired or were cancelled."""
    options = wanted or RetryBatch()
    if options.completion_window is not None:
        service.window_ms(options.completion_window)
    if (earlier := await once.earlier()) is not None:
        return earlier
    again, file = await retried(context, principal.scope, batch_id, options)
    work = Creation(context, tasks, principal, once, admission)
    return await work.create(again, file)


@router.get("")
async def list_batches(
    context: AppContext,
    principal: CurrentPrincipal,
    page: Annotated[PageRequest, Depends(paging(20, 100))],
) -> ListObject[BatchObject]:
    async with context.database.read() as session:
        return list_object(await BatchRepository(session, principal.scope).page(page), show_batch)


@router.get("/{batch_id}")
async def get_batch(batch_id: str, context: AppContext, principal: CurrentPrincipal) -> BatchObject:
    async with context.database.read() as session:
        return show_batch(await service.get_batch(session, principal.scope, batch_id))


@router.post("/{batch_id}/cancel")
async def cancel_batch(
    batch_id: str, context: AppContext, tasks: AppTasks, principal: CurrentPrincipal
) -> BatchObject:
    batch, began = await service.cancel_batch(context, principal.scope, batch_id)
    if began:
        await tasks.send(FINALIZE, batch_id)
    return show_batch(batch)


_LINES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "One JSON object a line",
        "content": {"application/jsonl": {"schema": {"type": "string"}}},
    }
}


@router.get("/{batch_id}/results", response_class=StreamingResponse, responses=_LINES)
async def get_results(
    batch_id: str, context: AppContext, principal: CurrentPrincipal
) -> StreamingResponse:
    """Lines that have ended so far, good and bad, in input order; `X-Incomplete: true` while
    there may be more."""
    async with context.database.read() as session:
        batch = await service.get_batch(session, principal.scope, batch_id)
    return StreamingResponse(
        result_lines(context, batch.id, (*SUCCEEDED, *UNSUCCESSFUL)),
        media_type="application/jsonl",
        headers={} if batch.status in TERMINAL else {"X-Incomplete": "true"},
    )
