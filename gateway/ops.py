"""Health and metrics, for probes and scrapers: no key needed, no secret shown."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from gateway.kit.context import Context
from gateway.kit.dependencies import AppContext
from worker.queue.base import QueueUnavailable

router = APIRouter(tags=["ops"])


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
