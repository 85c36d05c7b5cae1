from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from fastapi.responses import JSONResponse

from gateway.auth.dependencies import CurrentPrincipal
from gateway.auth.idempotency import CurrentOnce
from gateway.jobs import service
from gateway.jobs.repository import JobRepository
from gateway.jobs.schemas import CreateJob, JobObject, JobStatus, job_object
from gateway.jobs.states import TERMINAL
from gateway.jobs.waiting import wait_for_end
from gateway.kit.context import Context
from gateway.kit.database import WriteSession
from gateway.kit.dependencies import AppContext
from gateway.kit.pagination import ListObject, PageRequest, list_object, paging
from gateway.models import Request
from gateway.tenants.admission import CurrentAdmission

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

Paging = Annotated[PageRequest, Depends(paging(20, 100))]
Wait = Annotated[
    float | None,
    Query(
        ge=0,
        allow_inf_nan=False,
        description="Seconds to wait for the end, at most the server's limit",
    ),
]


@router.post("", status_code=202, response_model=JobObject)
async def create_job(
    wanted: CreateJob,
    context: AppContext,
    principal: CurrentPrincipal,
    once: CurrentOnce,
    admission: CurrentAdmission,
) -> JSONResponse:
    if (earlier := await once.earlier()) is not None:
        return earlier
    row, plan = await service.prepare_job(context, principal, wanted)
    await admission.admit(plan.most_tokens)
    created = False

    async def create(session: WriteSession) -> dict[str, Any]:
        nonlocal created
        created = True
        await service.add_job(session, context, principal, row)
        return job_object(row, None).model_dump()

    response = await once.answer(create, 202)
    if created:
        await service.dispatch_now(context, row, plan)
    return response


@router.get("/{job_id}")
async def get_job(
    job_id: str, context: AppContext, principal: CurrentPrincipal, wait: Wait = None
) -> JobObject:
    row = await service.get_job(context, principal.scope, job_id)
    if wait and row.state not in TERMINAL:
        await wait_for_end(context, row.id, min(wait, context.settings.long_poll_seconds))
        row = await service.get_job(context, principal.scope, job_id)
    return await _shown(context, principal, row)


@router.get("")
async def list_jobs(
    context: AppContext,
    principal: CurrentPrincipal,
    page: Paging,
    status: JobStatus | None = None,
    model: str | None = None,
) -> ListObject[JobObject]:
    async with context.database.read() as session:
        repository = JobRepository(session, principal.scope)
        found = await repository.page(page, status, model)
        results = await repository.results([row.id for row in found.rows])
    return list_object(found, lambda row: job_object(row, results.get(row.id)))


@router.post("/{job_id}/cancel")
async def cancel_job(job_id: str, context: AppContext, principal: CurrentPrincipal) -> JobObject:
    row = await service.cancel_job(context, principal.scope, job_id)
    return await _shown(context, principal, row)


async def _shown(context: Context, principal: CurrentPrincipal, row: Request) -> JobObject:
    async with context.database.read() as session:
        result = await JobRepository(session, principal.scope).result(row.id)
    return job_object(row, result)
