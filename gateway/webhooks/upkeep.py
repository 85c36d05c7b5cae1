"""Ends deliveries that ran out of time, and forgets old events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from sqlalchemy import delete, select, update

from gateway.kit.clock import now_ms
from gateway.kit.context import Context
from gateway.kit.database import WriteSession
from gateway.models import (
    WebhookAttempt,
    WebhookDelivery,
    WebhookEvent,
    WebhookSecret,
)
from gateway.webhooks.metrics import given_up
from gateway.webhooks.repository import PENDING

_CHUNK = 1000
_DAY_MS = 24 * 3600 * 1000


async def keep_webhooks(context: Context) -> None:
    """For a sweep, in short transactions."""
    now = now_ms()
    forgotten = now - context.settings.webhook_event_days * _DAY_MS
    failed = await _repeat(context, lambda session: give_up(session, now))
    await context.queues.statistics.add_or_lose(given_up(failed))
    await _repeat(context, lambda session: forget_events(session, forgotten))
    async with context.database.write() as session:
        await session.execute(delete(WebhookSecret).where(WebhookSecret.expires_at <= now))


async def _repeat(context: Context, step: Callable[[WriteSession], Awaitable[int]]) -> int:
    """Of how many rows, in all."""
    rows = 0
    while True:
        async with context.database.write() as session:
            done = await step(session)
        rows += done
        if done < _CHUNK:
            return rows


async def give_up(session: WriteSession, now: int) -> int:
    """Returns how many deliveries failed, at most a chunk."""
    chosen = (
        select(WebhookDelivery.id)
        .where(WebhookDelivery.state == PENDING, WebhookDelivery.expires_at <= now)
        .limit(_CHUNK)
        .with_for_update(key_share=True, skip_locked=True)
    )
    ids = list(await session.scalars(chosen))
    await session.execute(
        update(WebhookDelivery)
        .where(WebhookDelivery.id.in_(ids))
        .values(state="failed", finished_at=now)
        .execution_options(synchronize_session=False)
    )
    return len(ids)


async def forget_events(session: WriteSession, before: int) -> int:
    """Events older than that, with their deliveries and attempts, at most a chunk."""
    chosen = (
        select(WebhookEvent.id)
        .where(WebhookEvent.created_at < before)
        .order_by(WebhookEvent.created_at)
        .limit(_CHUNK)
    )
    ids = list(await session.scalars(chosen))
    deliveries = select(WebhookDelivery.id).where(WebhookDelivery.event_id.in_(ids))
    for statement in (
        delete(WebhookAttempt).where(WebhookAttempt.delivery_id.in_(deliveries)),
        delete(WebhookDelivery).where(WebhookDelivery.event_id.in_(ids)),
        delete(WebhookEvent).where(WebhookEvent.id.in_(ids)),
    ):
        await session.execute(statement.execution_options(synchronize_session=False))
    return len(ids)
