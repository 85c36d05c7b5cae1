"""What waits to be sent, and how endpoints are: of the whole deployment, for operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, case, func, or_, select

from gateway.kit.database import ReadSession
from gateway.models import WebhookDelivery, WebhookEndpoint
from gateway.webhooks.repository import IS_REGISTERED, PENDING

PENDING_STATES = ("due", "waiting", "held")
ENDPOINT_STATES = ("healthy", "failing", "paused", "disabled")


@dataclass(frozen=True, slots=True)
class Backlog:
    """Counts by state, every state named; how long the first delivery that is due has been so."""

    pending: Mapping[str, int]
    endpoints: Mapping[str, int]
    overdue_seconds: float


async def read_backlog(session: ReadSession, now: int) -> Backlog:
    paused = WebhookEndpoint.paused_until > now
    held = or_(WebhookEndpoint.disabled_at.is_not(None), paused)
    delivery = case(
        (held, "held"), (WebhookDelivery.next_attempt_at <= now, "due"), else_="waiting"
    )
    pending = (
        select(delivery.label("shown"), func.count(), func.min(WebhookDelivery.next_attempt_at))
        .join(WebhookEndpoint, WebhookEndpoint.id == WebhookDelivery.endpoint_id)
        .where(WebhookDelivery.state == PENDING)
        .group_by("shown")
    )
    found = {row[0]: (row[1], row[2]) for row in await session.execute(pending)}
    endpoint = case(
        (WebhookEndpoint.disabled_at.is_not(None), "disabled"),
        (paused, "paused"),
        (WebhookEndpoint.failures > 0, "failing"),
        else_="healthy",
    )
    _, first = found.get("due", (0, now))
    return Backlog(
        {state: found.get(state, (0, 0))[0] for state in PENDING_STATES},
        await _endpoints(session, endpoint),
        (now - first) / 1000,
    )


async def _endpoints(session: ReadSession, state: ColumnElement[Any]) -> Mapping[str, int]:
    rows = select(state.label("shown"), func.count()).where(
        IS_REGISTERED, WebhookEndpoint.deleted_at.is_(None)
    )
    found = {row[0]: row[1] for row in await session.execute(rows.group_by("shown"))}
    return {each: found.get(each, 0) for each in ENDPOINT_STATES}
