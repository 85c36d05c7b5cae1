"""Jobs: one asynchronous generation each."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import structlog

from gateway.auth.principal import Principal
from gateway.auth.scope import TenantScope
from gateway.billing.accounts import reserve
from gateway.errors import BadRequest, Conflict, NotFound, TooManyRequests
from gateway.jobs.dispatch import CANCELLED, dispatch
from gateway.jobs.locking import lock
from gateway.jobs.parameters import wrong_value
from gateway.jobs.repository import JobRepository, overdue
from gateway.jobs.schemas import CreateJob
from gateway.jobs.settlement import Settlement, settle
from gateway.jobs.states import TERMINAL
from gateway.jobs.storable import refuse_nul
from gateway.jobs.submission import (
    Plan,
    Submitter,
    model_name,
    new_request,
    plan,
    resolve_target,
)
from gateway.kit.clock import now_ms
from gateway.kit.context import Context
from gateway.kit.database import WriteSession
from gateway.models import Request
from gateway.webhooks.lifecycle import endpoint_for_url, webhook_target
from worker.protocol.types import RequestId
from worker.queue.base import QueueUnavailable

DEFAULT_DEADLINE_MS = 24 * 3600 * 1000
LONGEST_DEADLINE_MS = 7 * DEFAULT_DEADLINE_MS
_FAST_PATH_SECONDS = 2.0
_SWEEP = 500
_RETRY_AFTER_SECONDS = 5

EXPIRED = Settlement(
    "expired",
    error={
        "code": "request_timeout",
        "message": "This request could not be executed before its deadline.",
    },
)

_log = structlog.get_logger(__name__)


async def prepare_job(
    context: Context, principal: Principal, wanted: CreateJob
) -> tuple[Request, Plan]:
    """The row to add, and what to dispatch after the commit. Raises BadRequest, NotFound
    (model)."""
    deadline_at = _deadline(wanted.deadline)
    refuse_nul(wanted.body, "body")
    _refuse_streaming(wanted.body)
    async with context.database.read() as session:
        webhook = await webhook_target(session, context, principal.scope, wanted.webhook)
        target = await resolve_target(session, principal.scope, model_name(wanted.body))
    planned = await plan(context, target, wanted.endpoint, wanted.body)
    row = new_request(
        Submitter(principal.tenant_id, principal.key_id),
        planned,
        "job",
        wanted.priority,
        deadline_at,
        wanted.body,
        wanted.metadata,
    )
    row.webhook_endpoint_id, row.webhook_url = webhook
    return row, planned


async def add_job(
    session: WriteSession, context: Context, principal: Principal, row: Request
) -> None:
    """Raises TooManyRequests, BudgetExceeded."""
    repository = JobRepository(session, principal.scope)
    most = principal.limits.concurrent_jobs
    if most is not None:
        await repository.lock_tenant()
        if await repository.open_jobs() >= most:
            raise TooManyRequests(
                f"You have {most} jobs that have not ended, which is your limit. Please try "
                "again when one has.",
                code="concurrent_jobs_exceeded",
                retry_after=_RETRY_AFTER_SECONDS,
            )
    if row.webhook_url is not None:
        row.webhook_endpoint_id = await endpoint_for_url(
            session, context, principal.scope, row.webhook_url
        )
    repository.add(row)
    await session.flush()
    await reserve(session, row.tenant_id, row.reserved_nano)


async def dispatch_now(context: Context, row: Request, planned: Plan) -> None:
    """The fast path: best effort, as the dispatcher finds what is left."""
    async with context.database.read() as session:
        repository = JobRepository(session, TenantScope(row.tenant_id))
        window = context.settings.queue_window
        out = await repository.outstanding(row.base_model, row.request_class, window)
    if out >= window:
        return
    try:
        async with asyncio.timeout(_FAST_PATH_SECONDS):
            await dispatch(context, row.base_model, [planned.prepared(row.id)])
    except (QueueUnavailable, TimeoutError) as error:
        _log.warning("fast_path_unavailable", job=row.id, error=str(error))


async def get_job(context: Context, scope: TenantScope, job_id: str) -> Request:
    """Raises NotFound."""
    async with context.database.read() as session:
        row = await JobRepository(session, scope).job(job_id)
    if row is None:
        raise NotFound(f"No job found with request_id '{job_id}'.", param="id")
    return row


async def cancel_job(context: Context, scope: TenantScope, job_id: str) -> Request:
    """At once, whatever it is doing; a result that comes later is dropped and not billed.
    Cancelling a cancelled job changes nothing. Raises NotFound, Conflict."""
    row = await get_job(context, scope, job_id)
    await end_early(context, [row.id], CANCELLED)
    row = await get_job(context, scope, job_id)
    if row.state != "cancelled":
        raise Conflict(f"Cannot cancel a job with status '{row.state}'.")
    return row


async def end_early(context: Context, ids: list[str], settlement: Settlement) -> list[str]:
    """Ends open requests from outside: SQL first, then the queue, best effort."""
    async with context.database.write() as session:
        locked = await lock(session, ids)
        was_open = [
            request_id for request_id, row in locked.requests.items() if row.state not in TERMINAL
        ]
        by_model: dict[str, list[RequestId]] = {}
        for request_id in was_open:
            by_model.setdefault(locked.requests[request_id].base_model, []).append(
                RequestId(request_id)
            )
        await settle(session, locked, dict.fromkeys(was_open, settlement))
    for model, requests in by_model.items():
        await stop_in_queue(context, model, requests)
    return was_open


async def stop_in_queue(context: Context, model: str, ids: list[RequestId]) -> None:
    """Tombstones for requests that SQL has ended, and a ring for who waits. What an outage
    prevents costs only the work that goes on."""
    try:
        async with asyncio.timeout(_FAST_PATH_SECONDS):
            await context.queues.queue(model).cancel(ids)
            await context.queues.bell.ring(ids)
    except (QueueUnavailable, TimeoutError) as error:
        _log.warning("cancel_not_delivered", model=model, count=len(ids), error=str(error))


async def expire_jobs(context: Context) -> int:
    """Ends jobs and calls whose deadline has passed (batch lines end with their batch)."""
    total = 0
    while True:
        async with context.database.read() as session:
            ids = await overdue(session, _SWEEP)
        if ids:
            total += len(await end_early(context, ids, EXPIRED))
        if len(ids) < _SWEEP:
            return total


def _refuse_streaming(body: Mapping[str, Any]) -> None:
    """A job's answer is fetched whole. Raises BadRequest."""
    if body.get("stream"):
        raise BadRequest(
            "Unsupported parameter: 'stream' is not supported for jobs.",
            code="unsupported_parameter",
            param="stream",
        )


def _deadline(seconds: int | None) -> int:
    now = now_ms()
    if seconds is None:
        return now + DEFAULT_DEADLINE_MS
    if not now < seconds * 1000 <= now + LONGEST_DEADLINE_MS:
        raise wrong_value("deadline", "must be Unix seconds within the next 7 days")
    return seconds * 1000
