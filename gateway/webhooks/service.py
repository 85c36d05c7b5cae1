"""Records events in the transaction of the change they tell of, with one pending delivery for
each endpoint that wants them. Sending is the control processes' work (`delivery`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gateway.auth.scope import TenantScope
from gateway.errors import BadRequest, Conflict, NotFound
from gateway.kit.clock import now_ms
from gateway.kit.database import ReadSession, WriteSession
from gateway.kit.ids import new_id
from gateway.kit.sql import insert_new
from gateway.models import WebhookDelivery, WebhookEndpoint, WebhookEvent
from gateway.webhooks.events import EventType, NewEvent, Target, event_body
from gateway.webhooks.repository import EndpointRepository, EventRepository, live_endpoints
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
    listeners = Listeners(
        await live_endpoints(session, {event.tenant_id for event in events}, named)
    )
    deliveries = [
        delivery_row(event_id, event.tenant_id, target, now)
        for event_id, event in zip(ids, events, strict=True)
        for target in listeners.of(event)
    ]
    await insert_new(session, WebhookDelivery, deliveries)
    if deliveries:
        session.info[_DELIVERIES] = True


def has_deliveries(session: WriteSession) -> bool:
    """Whether something recorded in `session` will be sent: worth a message to the control
    processes after the commit."""
    return bool(session.info.get(_DELIVERIES))


class Listeners:
    """Of several events, each endpoint looked at only for its own tenant's."""

    def __init__(self, alive: Sequence[WebhookEndpoint]) -> None:
        self._by_id = {endpoint.id: endpoint for endpoint in alive}
        self._registered: dict[str, list[WebhookEndpoint]] = defaultdict(list)
        for endpoint in alive:
            if endpoint.kind == "endpoint":
                self._registered[endpoint.tenant_id].append(endpoint)

    def of(self, event: NewEvent) -> Iterator[Target]:
        """The endpoint that the event names, and the others that want it."""
        named = event.target and self._by_id.get(event.target.endpoint_id)
        if event.target and named and named.tenant_id == event.tenant_id:
            yield event.target
        for endpoint in self._registered[event.tenant_id]:
            if endpoint is not named and _wants(endpoint, event.type):
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


async def get_event(
    session: ReadSession | WriteSession, scope: TenantScope, event_id: str
) -> WebhookEvent:
    """Raises NotFound."""
    event = await EventRepository(session, scope).get(event_id)
    if event is None:
        raise NotFound(f"No webhook event found with id '{event_id}'.", param="id")
    return event


async def redeliver(
    session: WriteSession, scope: TenantScope, event_id: str, endpoint_id: str | None
) -> list[WebhookDelivery]:
    """Sends an event again, from the start of the schedule: to all that were told of it, or to
    one endpoint. Raises NotFound, BadRequest (endpoint), Conflict."""
    event = await get_event(session, scope, event_id)
    repository = EventRepository(session, scope)
    now = now_ms()
    if endpoint_id is not None:
        await _require_enabled(session, scope, endpoint_id)
        row = delivery_row(event.id, scope.tenant_id, Target(endpoint_id), now)
        await insert_new(session, WebhookDelivery, [row])
    chosen = [
        delivery
        for delivery in await repository.sendable(event.id)
        if endpoint_id in (None, delivery.endpoint_id)
    ]
    if not chosen:
        raise Conflict(
            "No endpoint that is enabled was told of this event: name one in "
            "'webhook_endpoint_id'.",
            code="nothing_to_redeliver",
        )
    for delivery in chosen:
        delivery.state, delivery.tries, delivery.finished_at = "pending", 0, None
        delivery.next_attempt_at, delivery.expires_at = now, now + GIVE_UP_MS
    await session.flush()
    await repository.unpause([delivery.endpoint_id for delivery in chosen])
    return chosen


async def _require_enabled(session: WriteSession, scope: TenantScope, endpoint_id: str) -> None:
    endpoint = await EndpointRepository(session, scope).get(endpoint_id)
    if endpoint is None:
        raise BadRequest(
            f"No such webhook endpoint: '{endpoint_id}'.",
            code="invalid_value",
            param="webhook_endpoint_id",
        )
    if endpoint.disabled_at is not None:
        raise Conflict(
            f"The webhook endpoint '{endpoint_id}' is disabled.", code="webhook_endpoint_disabled"
        )
