"""Ends requests: state, result, usage and batch counts in one transaction, exactly once.

The first terminal state wins; what comes later changes nothing and bills nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import select

from gateway.billing.service import amount_nano
from gateway.jobs.locking import Locked, Standing
from gateway.jobs.states import TERMINAL, TerminalState
from gateway.kit.clock import now_ms
from gateway.kit.database import WriteSession
from gateway.kit.ids import new_id
from gateway.kit.sql import insert_new, update_rows
from gateway.models import Batch, Price, Request, Result, UsageRecord
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
    await _insert_usage(session, locked, settled, now)
    return _count(locked, settled, now)


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


async def _insert_usage(
    session: WriteSession, locked: Locked, settlements: Mapping[str, Settlement], now: int
) -> None:
    used = {
        request_id: each.usage for request_id, each in settlements.items() if each.usage is not None
    }
    if not used:
        return
    price_ids = sorted({locked.requests[request_id].price_id for request_id in used})
    prices = await session.scalars(select(Price).where(Price.id.in_(price_ids)))
    by_id = {price.id: price for price in prices}
    rows = [
        _usage_row(
            locked.requests[request_id], usage, by_id[locked.requests[request_id].price_id], now
        )
        for request_id, usage in used.items()
    ]
    await insert_new(session, UsageRecord, rows)


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


def is_finished(batch: Batch) -> bool:
    ended = batch.completed + batch.failed + batch.cancelled + batch.expired
    return batch.in_progress_at is not None and ended == batch.total


def begin_finalizing(batch: Batch, now: int) -> None:
    """A batch that is being cancelled stays `cancelling` until its files are written."""
    if batch.status == "in_progress":
        batch.status = "finalizing"
        batch.finalizing_at = now
