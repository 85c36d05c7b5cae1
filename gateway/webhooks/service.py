"""Records events in the transaction of the change they tell of, with one pending delivery for
each endpoint that wants them. Sending is the control processes' work (`delivery`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gateway.kit.clock import now_ms
from gateway.kit.database import WriteSession
from gateway.kit.ids import new_id
from gateway.kit.sql import insert_new
from gateway.models import WebhookDelivery, WebhookEndpoint, WebhookEvent
from gateway.webhooks.events import EventType, NewEvent, Target, event_body
from gateway.webhooks.repository import live_endpoints
from gateway.webhooks.schedule import GIVE_UP_MS

_DELIVERIES = "webhook_deliveries"


async def record(
    session: WriteSession, tenant_id: str, type: EventType, data: Mapping[str, Any]
) -> None:
    """One event. `data` has the `id` of the object that it is about."""
    await record_all(session, [NewEvent(tenant_id, type, data)])


async def record_all(session: WriteSession, events: Sequence[NewEvent]) -> None:
    if not events:
        return
    now = now_ms()
    ids = [new_id("evt") for _ in events]
    rows = [
        {
            "id": event_id,
            "tenant_id": event.tenant_id,
            "type": event.type,
            "body": event_body(event_id, event, now),
            "created_at": now,
        }
        for event_id, event in zip(ids, events, strict=True)
    ]
    await insert_new(session, WebhookEvent, rows)
    named = {event.target.endpoint_id for event in events if event.target is not None}
    endpoints = await live_endpoints(session, {event.tenant_id for event in events}, named)
    deliveries = [
        delivery_row(event_id, event.tenant_id, target, now)
        for event_id, event in zip(ids, events, strict=True)
        for target in targets(event, endpoints)
    ]
    await insert_new(session, WebhookDelivery, deliveries)
    if deliveries:
        session.info[_DELIVERIES] = True


def has_deliveries(session: WriteSession) -> bool:
    """Whether something recorded in `session` will be sent: worth a message to the control
    processes after the commit."""
    return bool(session.info.get(_DELIVERIES))


def targets(event: NewEvent, endpoints: Sequence[WebhookEndpoint]) -> Iterator[Target]:
    """Endpoints of the event's tenant whose filter lets it through, and the one it names, once
    each. `endpoints` are those alive."""
    for endpoint in endpoints:
        if endpoint.tenant_id != event.tenant_id:
            continue
        if event.target is not None and event.target.endpoint_id == endpoint.id:
            yield event.target
        elif endpoint.kind == "endpoint" and _wants(endpoint, event.type):
            yield Target(endpoint.id)


def _wants(endpoint: WebhookEndpoint, type: EventType) -> bool:
    return endpoint.event_types is None or type in endpoint.event_types


def delivery_row(event_id: str, tenant_id: str, target: Target, now: int) -> dict[str, Any]:
    return {
        "id": new_id("whd"),
        "tenant_id": tenant_id,
        "event_id": event_id,
        "endpoint_id": target.endpoint_id,
        "url": target.url,
        "state": "pending",
        "attempts": 0,
        "tries": 0,
        "next_attempt_at": now,
        "expires_at": now + GIVE_UP_MS,
        "created_at": now,
    }
