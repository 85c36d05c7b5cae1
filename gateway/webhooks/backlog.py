"""What waits to be sent, and how endpoints are: of the whole deployment, for operators.

A dead receiver's deliveries wait for days, tenants may have hundreds of thousands of endpoints, and
whoever asks must not count them all. So no more than `COUNTED` are, of deliveries the oldest, of
endpoints those that come first in an index; since when the first delivery is due is found by one
probe of an index for each endpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Subquery, case, func, or_, select

from gateway.kit.database import ReadSession
from gateway.models import WebhookDelivery, WebhookEndpoint
from gateway.webhooks.claims import due_endpoints
from gateway.webhooks.repository import IS_REGISTERED, PENDING

PENDING_STATES = ("due", "waiting", "held")
COUNTED = 50_000
ENDPOINT_STATES = ("healthy", "failing", "paused", "disabled")


@dataclass(frozen=True, slots=True)
class Backlog:
    """Counts by state, every state named, of each kind at most `COUNTED` in all; how long the first
    delivery that is due has been so."""

    pending: Mapping[str, int]
    endpoints: Mapping[str, int]
    overdue_seconds: float


async def read_backlog(session: ReadSession, now: int) -> Backlog:
    due = await due_endpoints(session, now)
    first = min((each.due_at for each in due), default=now)
    return Backlog(
        await _pending(session, now), await _endpoints(session, now), (now - first) / 1000
    )


async def _pending(session: ReadSession, now: int) -> Mapping[str, int]:
    held = or_(WebhookEndpoint.disabled_at.is_not(None), WebhookEndpoint.paused_until > now)
    is_due = WebhookDelivery.next_attempt_at <= now
    oldest = (
        select(case((held, "held"), (is_due, "due"), else_="waiting").label("shown"))
        .join(WebhookEndpoint, WebhookEndpoint.id == WebhookDelivery.endpoint_id)
        .where(WebhookDelivery.state == PENDING)
        .order_by(WebhookDelivery.expires_at)
        .limit(COUNTED)
        .subquery()
    )
    return await _counts(session, oldest, PENDING_STATES)


async def _endpoints(session: ReadSession, now: int) -> Mapping[str, int]:
    state = case(
        (WebhookEndpoint.disabled_at.is_not(None), "disabled"),
        (WebhookEndpoint.paused_until > now, "paused"),
        (WebhookEndpoint.failures > 0, "failing"),
        else_="healthy",
    )
    registered = (
        select(state.label("shown"))
        .where(IS_REGISTERED, WebhookEndpoint.deleted_at.is_(None))
        .order_by(WebhookEndpoint.tenant_id, WebhookEndpoint.created_at, WebhookEndpoint.id)
        .limit(COUNTED)
        .subquery()
    )
    return await _counts(session, registered, ENDPOINT_STATES)


async def _counts(session: ReadSession, rows: Subquery, states: Sequence[str]) -> Mapping[str, int]:
    """Of `rows` by their `shown`."""
    counted = select(rows.c.shown, func.count()).group_by(rows.c.shown)
    found = {row[0]: row[1] for row in await session.execute(counted)}
    return {each: found.get(each, 0) for each in states}
