"""Which deliveries are due, and taking them: for the control processes, across tenants.

To claim a delivery is to count an attempt and to put its next one a lease ahead, so that two
senders never take the same one and a crash needs no cleaning up. Endpoints with something pending
are found by one probe of an index each, however much waits for any of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import and_, func, or_, select, update
from sqlalchemy.orm import aliased

from gateway.kit.database import ReadSession, WriteSession
from gateway.models import WebhookDelivery, WebhookEndpoint, WebhookEvent, WebhookSecret
from gateway.webhooks.repository import PENDING, is_live


@dataclass(frozen=True, slots=True)
class DueEndpoint:
    """`due_at` is when its first delivery came due."""

    id: str
    tenant_id: str
    failures: int
    due_at: int


@dataclass(frozen=True, slots=True)
class Claim:
    """One attempt at one delivery, and all that it takes to make it. `number` fences it: a
    later claim has another."""

    delivery_id: str
    number: int
    tries: int
    tenant_id: str
    endpoint_id: str
    event_id: str
    url: str
    body: str
    secrets: Sequence[WebhookSecret]


async def due_endpoints(session: ReadSession, now: int) -> list[DueEndpoint]:
    """Enabled, not paused, with a delivery that is due."""
    delivery, later, due = (aliased(WebhookDelivery) for _ in range(3))
    walk = (
        select(func.min(delivery.endpoint_id).label("id"))
        .where(delivery.state == PENDING)
        .cte("walk", recursive=True)
    )
    following = (
        select(func.min(later.endpoint_id))
        .where(later.state == PENDING, later.endpoint_id > walk.c.id)
        .scalar_subquery()
    )
    walk = walk.union_all(select(following).where(walk.c.id.is_not(None)))
    due_at = (
        select(func.min(due.next_attempt_at))
        .where(due.endpoint_id == WebhookEndpoint.id, due.state == PENDING)
        .scalar_subquery()
    )
    rows = await session.execute(
        select(WebhookEndpoint.id, WebhookEndpoint.tenant_id, WebhookEndpoint.failures, due_at)
        .join(walk, walk.c.id == WebhookEndpoint.id)
        .where(
            WebhookEndpoint.deleted_at.is_(None),
            WebhookEndpoint.disabled_at.is_(None),
            or_(WebhookEndpoint.paused_until.is_(None), WebhookEndpoint.paused_until <= now),
            due_at <= now,
        )
    )
    return [DueEndpoint(*row) for row in rows]


async def claim(
    session: WriteSession, shares: Mapping[str, int], now: int, lease_ms: int
) -> list[Claim]:
    """At most so many of each endpoint's due deliveries, the longest due first."""
    ids: list[str] = []
    for endpoint_id, count in shares.items():
        due = (
            select(WebhookDelivery.id)
            .where(
                WebhookDelivery.endpoint_id == endpoint_id,
                WebhookDelivery.state == PENDING,
                WebhookDelivery.next_attempt_at <= now,
            )
            .order_by(WebhookDelivery.next_attempt_at)
            .limit(count)
            .with_for_update(key_share=True, skip_locked=True)
        )
        ids += await session.scalars(due)
    await session.execute(
        update(WebhookDelivery)
        .where(WebhookDelivery.id.in_(ids))
        .values(
            attempts=WebhookDelivery.attempts + 1,
            tries=WebhookDelivery.tries + 1,
            next_attempt_at=now + lease_ms,
        )
        .execution_options(synchronize_session=False)
    )
    rows = await session.execute(
        select(WebhookDelivery, WebhookEvent.body, WebhookEndpoint)
        .join(WebhookEvent, WebhookEvent.id == WebhookDelivery.event_id)
        .join(WebhookEndpoint, WebhookEndpoint.id == WebhookDelivery.endpoint_id)
        .where(WebhookDelivery.id.in_(ids))
        .order_by(WebhookDelivery.id)
    )
    found = [(row[0], row[1], row[2]) for row in rows]
    secrets = await _secrets(session, [endpoint for _, _, endpoint in found], now)
    return [
        Claim(
            delivery_id=delivery.id,
            number=delivery.attempts,
            tries=delivery.tries,
            tenant_id=delivery.tenant_id,
            endpoint_id=endpoint.id,
            event_id=delivery.event_id,
            url=delivery.url or endpoint.url,
            body=body,
            secrets=secrets[_owner(endpoint)],
        )
        for delivery, body, endpoint in found
    ]


def _owner(endpoint: WebhookEndpoint) -> tuple[str, str | None]:
    """Whose secrets sign: the endpoint's own, or the tenant's default for a job's URL."""
    return endpoint.tenant_id, endpoint.id if endpoint.kind == "endpoint" else None


async def _secrets(
    session: WriteSession, endpoints: Collection[WebhookEndpoint], now: int
) -> dict[tuple[str, str | None], list[WebhookSecret]]:
    """Live ones by owner, the current one first."""
    owners = {_owner(endpoint) for endpoint in endpoints}
    own = [endpoint_id for _, endpoint_id in owners if endpoint_id is not None]
    default = [tenant_id for tenant_id, endpoint_id in owners if endpoint_id is None]
    of_default = and_(WebhookSecret.endpoint_id.is_(None), WebhookSecret.tenant_id.in_(default))
    rows = await session.scalars(
        select(WebhookSecret)
        .where(or_(WebhookSecret.endpoint_id.in_(own), of_default), is_live(now))
        .order_by(WebhookSecret.created_at.desc(), WebhookSecret.id.desc())
    )
    by_owner: dict[tuple[str, str | None], list[WebhookSecret]] = {owner: [] for owner in owners}
    for secret in rows:
        by_owner[secret.tenant_id, secret.endpoint_id].append(secret)
    return by_owner
