"""Synchronous calls: a request of class `interactive`, awaited."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.adapters.repository import BaseModelRepository, prompt_formats
from gateway.adapters.service import prompts_of
from gateway.auth.idempotency import Idempotency, Recalled
from gateway.auth.principal import Principal
from gateway.billing.accounts import reserve
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
    resolve_target,
)
from gateway.jobs.waiting import wait_for_end
from gateway.kit.clock import now_ms
from gateway.kit.context import Context
from gateway.kit.database import ReadSession, WriteSession
from gateway.kit.prompts import Prompts
from gateway.models import Request, Result
from gateway.tenants.admission import Admission

RETRY_AFTER_SECONDS = 5


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, and the key that makes two calls one. `fingerprint` is of the body."""

    principal: Principal
    idempotency: Idempotency
    fingerprint: str
    admission: Admission


@dataclass(frozen=True, slots=True)
class Call:
    """A synchronous call that was accepted. `prompts` spells its tokens; `replayed`: an earlier
    call with the same key began it, and may still wait for it."""

    caller: Caller
    row: Request
    prompts: Prompts
    replayed: bool = False


async def begin(context: Context, caller: Caller, endpoint: Endpoint, body: dict[str, Any]) -> Call:
    """Submits and dispatches, or finds what the same call has submitted before. Raises
    BadRequest, NotFound (model), Unavailable when no live worker serves the model, Conflict
    (`idempotency_conflict`), TooManyRequests, BudgetExceeded, QueueUnavailable."""
    refuse_nul(body, "body")
    principal = caller.principal
    if (earlier := await _earlier(context, caller)) is not None:
        return earlier
    async with context.database.read() as session:
        target = await resolve_target(session, principal.scope, model_name(body))
    planned = await plan(context, target, endpoint, body)
    await _require_worker(context, target)
    await caller.admission.admit(planned.most_tokens)
    deadline_at = now_ms() + int(context.settings.sync_seconds * 1000)
    by = Submitter(principal.tenant_id, principal.key_id)
    row = new_request(by, planned, "call", "interactive", deadline_at, body)
    row, replayed = await _store(context, caller, row)
    if not replayed:
        await dispatch_now(context, row, planned)
    return Call(caller, row, await target.prompts(context), replayed)


async def finish(context: Context, call: Call) -> Result:
    """Waits for the answer. Raises Unavailable after the longest synchronous call."""
    row = call.row
    if not await wait_for_end(context, row.id, context.settings.sync_seconds):
        await end_early(context, [row.id], EXPIRED)
    async with context.database.read() as session:
        result = await JobRepository(session, call.caller.principal.scope).result(row.id)
    if result is None or result.status_code is None:
        await _release_key(context, call)
        raise Unavailable(
            "The request was not answered in time. Please retry it.",
            code="request_timeout",
            retry_after=RETRY_AFTER_SECONDS,
        )
    return result


async def abandon(context: Context, call: Call) -> None:
    """The client is gone: nothing is computed or billed any more, and its key may be used
    again. What another call began goes on."""
    if not call.replayed:
        await end_early(context, [call.row.id], CANCELLED)
        await _release_key(context, call)


async def _earlier(context: Context, caller: Caller) -> Call | None:
    """What the same call has submitted before, whatever has become of its adapter since."""
    async with context.database.read() as session:
        recalled = await caller.idempotency.earlier(session, caller.fingerprint)
        if recalled is None:
            return None
        row = await _submitted(session, caller, recalled)
        base = await BaseModelRepository(session).get(row.base_model)
        assert base is not None  # a foreign key
        formats = await prompt_formats(session, [row.adapter_revision_id])
    prompts = await prompts_of(context, base, formats.get(row.adapter_revision_id))
    return Call(caller, row, prompts, replayed=True)


async def _submitted(
    session: ReadSession | WriteSession, caller: Caller, recalled: Recalled
) -> Request:
    repository = JobRepository(session, caller.principal.scope)
    return await repository.call(recalled.body["request_id"])


async def _store(context: Context, caller: Caller, row: Request) -> tuple[Request, bool]:
    """The row, or that of the earlier call with the same key."""
    async with context.database.write() as session:

        async def create() -> dict[str, Any]:
            JobRepository(session, caller.principal.scope).add(row)
            await session.flush()
            await reserve(session, row.tenant_id, row.reserved_nano)
            return _kept(row)

        recalled = await caller.idempotency.recall(session, caller.fingerprint, create)
        if not recalled.replayed:
            return row, False
        return await _submitted(session, caller, recalled), True


def _kept(row: Request) -> dict[str, Any]:
    """For an Idempotency-Key, in place of an answer."""
    return {"request_id": row.id}


async def _release_key(context: Context, call: Call) -> None:
    """Also of an earlier call: the process that served it may have died."""
    if call.caller.idempotency.key is not None:
        async with context.database.write() as session:
            await call.caller.idempotency.release(session, _kept(call.row))


async def _require_worker(context: Context, target: Target) -> None:
    base = target.resolved.base.name
    live = await context.queues.directory.workers()
    if not any(worker.model == base for worker in live):
        raise Unavailable(
            f"No worker serves the model '{base}' at the moment. Please retry later.",
            code="model_unavailable",
            retry_after=RETRY_AFTER_SECONDS,
        )
