"""What an attempt changes: the delivery, its log, and its endpoint's circuit breaker."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select

from gateway.kit.clock import now_ms
from gateway.kit.database import WriteSession
from gateway.kit.sql import insert_ignoring
from gateway.models import WebhookAttempt, WebhookDelivery, WebhookEndpoint
from gateway.settings import Settings
from gateway.webhooks.breaker import Health, after_failure, after_success
from gateway.webhooks.claims import Claim
from gateway.webhooks.schedule import delay_ms
from gateway.webhooks.sending import Outcome


@dataclass(frozen=True, slots=True)
class Attempted:
    claim: Claim
    outcome: Outcome


async def record_outcomes(
    session: WriteSession, attempted: Sequence[Attempted], settings: Settings
) -> list[WebhookDelivery]:
    """Returns deliveries that have ended. One that was claimed again, or scheduled anew, since then
    keeps what it has."""
    deliveries = await session.scalars(
        select(WebhookDelivery)
        .where(WebhookDelivery.id.in_([each.claim.delivery_id for each in attempted]))
        .order_by(WebhookDelivery.id)
        .with_for_update(key_share=True)
    )
    by_id = {delivery.id: delivery for delivery in deliveries}
    endpoints = await session.scalars(
        select(WebhookEndpoint)
        .where(WebhookEndpoint.id.in_([each.claim.endpoint_id for each in attempted]))
        .order_by(WebhookEndpoint.id)
        .with_for_update(key_share=True)
    )
    endpoints_by_id = {endpoint.id: endpoint for endpoint in endpoints}
    now, ended = now_ms(), []
    for each in attempted:
        delivery = by_id.get(each.claim.delivery_id)
        if delivery is None:
            continue  # its event has been forgotten
        await _log(session, each)
        endpoint = endpoints_by_id[each.claim.endpoint_id]
        _judge(endpoint, each.outcome, now, settings.webhook_failures)
        current = (delivery.attempts, delivery.tries) == (each.claim.number, each.claim.tries)
        if delivery.state == "pending" and current:
            _advance(delivery, each.outcome, now)
            if delivery.state != "pending":
                ended.append(delivery)
    return ended


async def _log(session: WriteSession, each: Attempted) -> None:
    outcome = each.outcome
    row = insert_ignoring(session, WebhookAttempt).values(
        delivery_id=each.claim.delivery_id,
        number=each.claim.number,
        at=outcome.at,
        duration_ms=outcome.duration_ms,
        status_code=outcome.status_code,
        error=outcome.error,
    )
    await session.execute(row)


def _advance(delivery: WebhookDelivery, outcome: Outcome, now: int) -> None:
    delay = delay_ms(delivery.tries, outcome.retry_after_ms, random.random())
    if outcome.succeeded:
        delivery.state, delivery.finished_at = "delivered", now
    elif outcome.gone or delay is None:
        delivery.state, delivery.finished_at = "failed", now
    else:
        delivery.next_attempt_at = now + delay


def _judge(endpoint: WebhookEndpoint, outcome: Outcome, now: int, threshold: int) -> None:
    """A receiver that says it is gone has not failed."""
    if outcome.gone:
        if endpoint.kind == "endpoint" and endpoint.disabled_at is None:
            endpoint.disabled_at, endpoint.disabled_reason = now, "gone"
        return
    health = Health(endpoint.failures, endpoint.failing_since, endpoint.paused_until)
    if outcome.succeeded:
        health = after_success()
    else:
        health = after_failure(health, now, threshold, outcome.retry_after_ms)
    endpoint.failures, endpoint.failing_since = health.failures, health.failing_since
    endpoint.paused_until = health.paused_until
