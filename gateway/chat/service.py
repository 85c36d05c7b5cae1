"""Synchronous calls: a request of class `interactive`, awaited."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.auth.principal import Principal
from gateway.errors import Unavailable
from gateway.jobs.dispatch import CANCELLED
from gateway.jobs.generation import Endpoint
from gateway.jobs.repository import JobRepository
from gateway.jobs.service import EXPIRED, dispatch_now, end_early
from gateway.jobs.storable import refuse_nul
from gateway.jobs.submission import (
    Submitter,
    Target,
    model_name,
    new_request,
    plan,
    prompts_for,
    resolve_target,
)
from gateway.jobs.waiting import wait_for_end
from gateway.kit.clock import now_ms
from gateway.kit.context import Context
from gateway.kit.prompts import Prompts
from gateway.models import Request, Result

RETRY_AFTER_SECONDS = 5


@dataclass(frozen=True, slots=True)
class Call:
    """A synchronous call that was accepted. `prompts` spells its tokens."""

    row: Request
    prompts: Prompts


async def begin(
    context: Context, principal: Principal, endpoint: Endpoint, body: dict[str, Any]
) -> Call:
    """Submits and dispatches. Raises BadRequest, NotFound (model), Unavailable when no live
    worker serves the model, QueueUnavailable."""
    refuse_nul(body, "body")
    async with context.database.read() as session:
        target = await resolve_target(session, principal.scope, model_name(body))
    planned = await plan(context, target, endpoint, body)
    await _require_worker(context, target)
    row = new_request(
        Submitter(principal.tenant_id, principal.key_id),
        planned,
        "call",
        "interactive",
        now_ms() + int(context.settings.sync_seconds * 1000),
        body,
    )
    async with context.database.write() as session:
        JobRepository(session, principal.scope).add(row)
    await dispatch_now(context, row, planned)
    return Call(row, await prompts_for(context, target))


async def finish(context: Context, principal: Principal, row: Request) -> Result:
    """Waits for the answer. Raises Unavailable after the longest synchronous call."""
    if not await wait_for_end(context, row.id, context.settings.sync_seconds):
        await end_early(context, [row.id], EXPIRED)
    async with context.database.read() as session:
        result = await JobRepository(session, principal.scope).result(row.id)
    if result is None or result.status_code is None:
        raise Unavailable(
            "The request was not answered in time. Please retry it.",
            code="request_timeout",
            retry_after=RETRY_AFTER_SECONDS,
        )
    return result


async def abandon(context: Context, row: Request) -> None:
    """The client is gone: nothing is computed or billed any more."""
    await end_early(context, [row.id], CANCELLED)


async def _require_worker(context: Context, target: Target) -> None:
    base = target.resolved.base.name
    live = await context.queues.directory.workers()
    if not any(worker.model == base for worker in live):
        raise Unavailable(
            f"No worker serves the model '{base}' at the moment. Please retry later.",
            code="model_unavailable",
            retry_after=RETRY_AFTER_SECONDS,
        )
