"""Ends requests: state, result, usage, counts, account and event in one transaction, once each.

The first terminal state wins; what comes later changes nothing and bills nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import bindparam, select, update

from gateway.billing.accounts import Change, apply
from gateway.billing.booking import book
from gateway.billing.service import amount_nano
from gateway.jobs.events import job_ended
from gateway.jobs.locking import Locked, Standing
from gateway.jobs.states import TERMINAL, TerminalState
from gateway.kit.clock import now_ms
from gateway.kit.database import WriteSession
from gateway.kit.ids import new_id
from gateway.kit.sql import insert_new, update_rows
from gateway.models import Batch, BatchModel, Price, Request, Result
from gateway.webhooks.service import record_all
from worker.protocol.types import RequestClass, TokenUsage


@dataclass(frozen=True, slots=True)
class Settlement:
    """How a request ended. `usage` is set for what is billed: completed requests."""

    state: TerminalState
    status_code: int | None = None
    body: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    usage: TokenUsage | None = None


async def settle(
    session: WriteSession, locked: Locked, settlements: Mapping[str, Settlement]
) -> list[str]:
    """Ends locked requests that are still open. Returns batches that have no line left to run."""
    open_ids = [
        request_id
        for request_id in settlements
        if locked.requests[request_id].state not in TERMINAL
    ]
    now = now_ms()
    new = await _insert_results(session, {each: settlements[each] for each in open_ids}, now)
    settled = {request_id: settlements[request_id] for request_id in new}
    for request_id, settlement in settled.items():
        locked.requests[request_id].state = settlement.state
    ended = [
        {"id": request_id, "state": each.state, "finished_at": now}
        for request_id, each in settled.items()
    ]
    await update_rows(session, Request, ended)
    jobs = [locked.requests[each] for each in settled if locked.requests[each].kind == "job"]
    await record_all(session, [job_ended(job, settled[job.id].state) for job in jobs])
    done = _count(locked, settled, now)
    await dequeue(session, _waited(locked, settled))
    used = await book(session, await _usage_rows(session, locked, settled, now))
    await apply(session, _changes(locked, settled, used), now)
    return done


async def _insert_results(
    session: WriteSession, settlements: Mapping[str, Settlement], now: int
) -> list[str]:
    rows = [
        {
            "request_id": request_id,
            "status_code": each.status_code,
            "body": each.body,
            "error": each.error,
            "created_at": now,
        }
        for request_id, each in settlements.items()
    ]
    return await insert_new(session, Result, rows)


async def _usage_rows(
    session: WriteSession, locked: Locked, settlements: Mapping[str, Settlement], now: int
) -> list[dict[str, Any]]:
    used = {
        request_id: each.usage for request_id, each in settlements.items() if each.usage is not None
    }
    if not used:
        return []
    price_ids = sorted({locked.requests[request_id].price_id for request_id in used})
    prices = await session.scalars(select(Price).where(Price.id.in_(price_ids)))
    by_id = {price.id: price for price in prices}
    return [
        _usage_row(
            locked.requests[request_id], usage, by_id[locked.requests[request_id].price_id], now
        )
        for request_id, usage in used.items()
    ]


def _changes(
    locked: Locked, settled: Iterable[str], used: Iterable[Mapping[str, Any]]
) -> Mapping[str, Change]:
    changes: dict[str, Change] = defaultdict(Change)
    for request_id in settled:
        request = locked.requests[request_id]
        changes[request.tenant_id].released += request.reserved_nano
    for row in used:
        changes[row["tenant_id"]].spent += row["amount_nano"]
    return changes


def _usage_row(request: Standing, usage: TokenUsage, price: Price, now: int) -> dict[str, Any]:
    return {
        "id": new_id("usage"),
        "request_id": request.id,
        "tenant_id": request.tenant_id,
        "key_id": request.key_id,
        "batch_id": request.batch_id,
        "model": request.model,
        "base_model": request.base_model,
        "adapter_revision_id": request.adapter_revision_id,
        "request_class": request.request_class,
        "prompt_tokens": usage.prompt,
        "cached_tokens": usage.cached,
        "completion_tokens": usage.completion,
        "price_id": price.id,
        "amount_nano": amount_nano(
            price,
            cast(RequestClass, request.request_class),
            usage.prompt,
            usage.cached,
            usage.completion,
        ),
        "created_at": now,
    }


def _count(locked: Locked, settlements: Mapping[str, Settlement], now: int) -> list[str]:
    of_batch: dict[str, list[str]] = defaultdict(list)
    for request_id in settlements:
        if batch_id := locked.requests[request_id].batch_id:
            of_batch[batch_id].append(request_id)
    done = []
    for batch_id, ids in of_batch.items():
        batch = locked.batches[batch_id]
        for request_id in ids:
            _count_one(batch, locked.requests[request_id], settlements[request_id])
        if is_finished(batch):
            done.append(batch_id)
            begin_finalizing(batch, now)
    return done


def _count_one(batch: Batch, request: Standing, settlement: Settlement) -> None:
    setattr(batch, settlement.state, getattr(batch, settlement.state) + 1)
    batch.enqueued_tokens -= request.prompt_tokens
    if usage := settlement.usage:
        batch.prompt_tokens += usage.prompt
        batch.cached_tokens += usage.cached
        batch.completion_tokens += usage.completion


def _waited(locked: Locked, ended: Iterable[str]) -> Mapping[tuple[str, str], int]:
    """Prompt tokens that wait no more, by batch and model, in batches of several models."""
    tokens: dict[tuple[str, str], int] = defaultdict(int)
    for request_id in ended:
        request = locked.requests[request_id]
        if request.batch_id and locked.batches[request.batch_id].model is None:
            tokens[request.batch_id, request.model] += request.prompt_tokens
    return tokens


async def dequeue(session: WriteSession, tokens: Mapping[tuple[str, str], int]) -> None:
    """`tokens` by batch, which is locked, and model."""
    if not tokens:
        return
    rows = BatchModel.__table__
    statement = (
        update(BatchModel)
        .where(rows.c.batch_id == bindparam("of_batch"), rows.c.model == bindparam("of_model"))
        .values(enqueued_tokens=rows.c.enqueued_tokens - bindparam("count"))
    )
    await (await session.connection()).execute(
        statement,
        [
            {"of_batch": batch_id, "of_model": model, "count": count}
            for (batch_id, model), count in tokens.items()
        ],
    )


def is_finished(batch: Batch) -> bool:
    ended = batch.completed + batch.failed + batch.cancelled + batch.expired
    return batch.in_progress_at is not None and ended == batch.total


def begin_finalizing(batch: Batch, now: int) -> None:
    """A batch that is being cancelled stays `cancelling` until its files are written."""
    if batch.status == "in_progress":
        batch.status = "finalizing"
        batch.finalizing_at = now
