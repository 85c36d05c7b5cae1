"""Health and metrics, for probes and scrapers: no key needed, no secret shown."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from msgspec import to_builtins
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from sqlalchemy.exc import SQLAlchemyError

from gateway.adapters.repository import BaseModelRepository
from gateway.auth.dependencies import AdminPrincipal
from gateway.kit.context import Context
from gateway.kit.dependencies import AppContext
from worker.queue.base import QueueUnavailable

router = APIRouter(tags=["ops"])


class WorkerObject(BaseModel):
    worker: str
    model: str
    limits: dict[str, int]
    free: dict[str, Any]
    seen_at: float


class WorkerList(BaseModel):
    object: Literal["list"] = "list"
    data: list[WorkerObject]


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


class Readiness(BaseModel):
    """`workers`: live ones by model; None while Redis does not answer."""

    status: Literal["ok", "unavailable"]
    checks: dict[str, Literal["ok", "unavailable"]]
    workers: dict[str, int] | None


@router.get("/readyz", response_model=Readiness, responses={503: {"model": Readiness}})
async def readyz(context: AppContext) -> JSONResponse:
    """The database and Redis answer too: 200, else 503 and which one does not. `workers` counts
    the live ones of each model: 0 is no reason to send no traffic, as batches and jobs wait."""
    models, live = await _models(context), await _live(context)
    checks = {
        "database": "unavailable" if models is None else "ok",
        "redis": "unavailable" if live is None else "ok",
    }
    ready = models is not None and live is not None
    counts = {**dict.fromkeys(models or (), 0), **Counter(live or ())}
    body = {
        "status": "ok" if ready else "unavailable",
        "checks": checks,
        "workers": counts if live is not None else None,
    }
    return JSONResponse(body, 200 if ready else 503)


@router.get("/v1/admin/workers", tags=["admin"])
async def workers(context: AppContext, operator: AdminPrincipal) -> WorkerList:
    """Live workers: what they serve, the most they can take, what is free now."""
    live = await context.queues.directory.workers()
    return WorkerList(data=[WorkerObject.model_validate(to_builtins(info)) for info in live])


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(request: Request) -> Response:
    """Of this process, for Prometheus."""
    return Response(request.app.state.metrics.render(), media_type=CONTENT_TYPE_LATEST)


async def _models(context: Context) -> list[str] | None:
    """Names of base models; None when the database does not answer."""
    try:
        async with context.database.read() as session:
            return [base.name for base in await BaseModelRepository(session).all()]
    except SQLAlchemyError:
        return None


async def _live(context: Context) -> list[str] | None:
    """The model of every live worker; None when Redis does not answer."""
    try:
        return [worker.model for worker in await context.queues.directory.workers()]
    except QueueUnavailable:
        return None
