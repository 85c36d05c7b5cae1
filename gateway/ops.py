"""Health and metrics, for probes and scrapers: no key needed, no secret shown."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from msgspec import to_builtins
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

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


@router.get("/readyz")
async def readyz(context: AppContext) -> JSONResponse:
    """The database and Redis answer too: 200, else 503 and which one does not."""
    checks = {"database": await _database(context), "redis": await _redis(context)}
    ready = all(state == "ok" for state in checks.values())
    status = "ok" if ready else "unavailable"
    return JSONResponse({"status": status, "checks": checks}, 200 if ready else 503)


@router.get("/v1/admin/workers", tags=["admin"])
async def workers(context: AppContext, operator: AdminPrincipal) -> WorkerList:
    """Live workers: what they serve, the most they can take, what is free now."""
    live = await context.queues.directory.workers()
    return WorkerList(data=[WorkerObject.model_validate(to_builtins(info)) for info in live])


@router.get("/metrics", include_in_schema=False)
async def metrics(request: Request) -> Response:
    return Response(request.app.state.metrics.render(), media_type=CONTENT_TYPE_LATEST)


async def _database(context: Context) -> str:
    try:
        async with context.database.read() as session:
            await session.execute(text("SELECT 1"))
    except SQLAlchemyError:
        return "unavailable"
    return "ok"


async def _redis(context: Context) -> str:
    try:
        await context.queues.directory.workers()
    except QueueUnavailable:
        return "unavailable"
    return "ok"
