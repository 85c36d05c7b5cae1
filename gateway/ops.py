"""Health and metrics, for probes and scrapers: no key needed, no secret shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import structlog
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from msgspec import to_builtins
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import GaugeMetricFamily
from pydantic import BaseModel
from sqlalchemy.exc import SQLAlchemyError

from gateway.adapters.repository import BaseModelRepository
from gateway.auth.dependencies import AdminPrincipal
from gateway.jobs import operations
from gateway.kit.clock import now_ms
from gateway.kit.context import Context
from gateway.kit.dependencies import AppContext
from gateway.kit.statistics import families
from gateway.webhooks import metrics as webhook_metrics
from gateway.webhooks.backlog import read_backlog
from worker.queue.base import ClassDepth, QueueUnavailable

router = APIRouter(tags=["ops"])

_log = structlog.get_logger(__name__)


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
async def metrics(request: Request, context: AppContext) -> Response:
    """For Prometheus: this process's HTTP requests, and of the whole deployment, the same from
    every process, latencies, tokens, queues and webhooks. Without Redis or the database only the
    former."""
    try:
        depths = await operations.depths(context)
        counts = await context.queues.statistics.read()
        async with context.database.read() as session:
            backlog = await read_backlog(session, now_ms())
        webhooks = webhook_metrics.families(counts, backlog)
        shared = [*families(counts), _queue_family(depths), *webhooks]
    except (QueueUnavailable, SQLAlchemyError) as error:
        _log.warning("deployment_not_measured", error=str(error))
        shared = []
    return Response(request.app.state.metrics.render(shared), media_type=CONTENT_TYPE_LATEST)


def _queue_family(depths: Mapping[str, Mapping[str, ClassDepth]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(
        "batten_queue_requests",
        "Requests in the queue in Redis: ready, and held by workers",
        labels=["model", "class", "state"],
    )
    for model, classes in depths.items():
        for name, depth in classes.items():
            family.add_metric([model, name, "ready"], depth.ready)
            family.add_metric([model, name, "leased"], depth.leased)
    return family


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
