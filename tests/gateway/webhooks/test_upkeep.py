"""What happens to endpoints that fail, end or go, and to what is old."""

from __future__ import annotations

import time
from typing import Any

import pytest
from sqlalchemy import func, select, update

from gateway.kit.clock import now_ms
from gateway.kit.ids import new_id
from gateway.kit.sql import insert_new
from gateway.models import (
    WebhookAttempt,
    WebhookDelivery,
    WebhookEndpoint,
    WebhookEvent,
    WebhookSecret,
)
from gateway.webhooks import service, upkeep
from gateway.webhooks.claims import claim, due_endpoints
from gateway.webhooks.events import Target
from gateway.webhooks.upkeep import keep_webhooks
from tests.gateway.webhooks.conftest import Hooks, Receiver, status


async def count(hooks: Hooks, model: Any) -> int:
    async with hooks.database.read() as session:
        return await session.scalar(select(func.count()).select_from(model)) or 0


async def test_the_circuit_breaker(hooks: Hooks, receiver: Receiver) -> None:
    receiver.answers["/dead"] = status(500)
    dead = await hooks.add(receiver.url("/dead"), event_types=["batch.failed"])
    await hooks.add(receiver.url("/ok"), event_types=["batch.completed"])
    for _ in range(12):
        await hooks.tell("batch.failed")
        await hooks.tell("batch.completed")
    await hooks.deliver()
    assert len(receiver.at("/ok")) == 12
    tried = len(receiver.at("/dead"))
    assert 5 <= tried <= 8  # four at once
    shown = await hooks.get(dead["id"])
    assert shown["failures"] == 5
    assert shown["failing_since"] <= shown["paused_until"] - 60
    await hooks.time_passes()
    await hooks.deliver()
    assert len(receiver.at("/dead")) == tried + 1  # half open: one
    receiver.answers.clear()
    await hooks.time_passes()
    await hooks.deliver()
    well = await hooks.get(dead["id"])
    assert (well["failures"], well["failing_since"]) == (0, None)
    assert len(receiver.at("/dead")) == tried + 1 + 12
    assert await hooks.deliver() == 0


async def test_forgiving_an_endpoint_its_failures(hooks: Hooks, receiver: Receiver) -> None:
    made = await hooks.add(receiver.url())
    async with hooks.database.write() as session:
        paused = {"failures": 9, "failing_since": 1, "paused_until": now_ms() + 10**6}
        await session.execute(update(WebhookEndpoint).values(**paused))
    event_id = await hooks.tell()
    assert await hooks.deliver() == 0
    path = f"/v1/webhook_endpoints/{made['id']}"
    shown = (await hooks.client.patch(path, json={"enabled": True})).json()
    assert (shown["failures"], shown["failing_since"], shown["paused_until"]) == (0, None, None)
    assert await hooks.deliver() == 1
    async with hooks.database.write() as session:
        await session.execute(update(WebhookEndpoint).values(**paused))
    await hooks.client.post(f"/v1/webhook_events/{event_id}/redeliver")
    assert await hooks.deliver() == 1  # asking for it is asking now


async def test_a_deleted_endpoint_gets_nothing_more(hooks: Hooks, receiver: Receiver) -> None:
    receiver.answers["/hook"] = status(500)
    made = await hooks.add(receiver.url("/hook"))
    event_id = await hooks.tell()
    await hooks.deliver()
    await hooks.client.delete(f"/v1/webhook_endpoints/{made['id']}")
    assert (await hooks.delivery(event_id))["status"] == "failed"
    await hooks.time_passes()
    await hooks.tell()
    assert await hooks.deliver() == 0


async def test_a_disabled_endpoint_keeps_what_waits(hooks: Hooks, receiver: Receiver) -> None:
    made = await hooks.add(receiver.url())
    path = f"/v1/webhook_endpoints/{made['id']}"
    await hooks.tell()
    shown = (await hooks.client.patch(path, json={"enabled": False})).json()
    assert (shown["status"], shown["disabled_reason"]) == ("disabled", "asked")
    assert await hooks.deliver() == 0
    await hooks.client.patch(path, json={"enabled": True})
    assert await hooks.deliver() == 1


async def test_a_changed_url_holds_for_what_waits(hooks: Hooks, receiver: Receiver) -> None:
    made = await hooks.add(receiver.url("/old"))
    await hooks.tell()
    path = f"/v1/webhook_endpoints/{made['id']}"
    await hooks.client.post(path, json={"url": receiver.url("/new")})
    await hooks.deliver()
    assert [got.path for got in receiver.received] == ["/new"]


async def test_deliveries_run_out_of_time(
    hooks: Hooks, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "_CHUNK", 2)
    await hooks.add(receiver.url())
    events = [await hooks.tell() for _ in range(5)]
    async with hooks.database.write() as session:
        late = update(WebhookDelivery).where(WebhookDelivery.event_id != events[0])
        await session.execute(late.values(expires_at=now_ms() - 1))
    await keep_webhooks(hooks.context)
    found = [(await hooks.delivery(event_id))["status"] for event_id in events]
    assert found == ["pending", *["failed"] * 4]
    assert await hooks.deliver() == 1


async def test_old_events_are_forgotten(
    hooks: Hooks, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "_CHUNK", 2)
    made = await hooks.add(receiver.url())
    for _ in range(5):
        await hooks.tell()
    await hooks.deliver()
    rotate = f"/v1/webhook_endpoints/{made['id']}/rotate_secret"
    await hooks.client.post(rotate, json={"overlap_seconds": 0})
    async with hooks.database.write() as session:
        await session.execute(update(WebhookEvent).values(created_at=1))
    kept = await hooks.tell()
    await keep_webhooks(hooks.context)
    assert await count(hooks, WebhookEvent) == await count(hooks, WebhookDelivery) == 1
    assert await count(hooks, WebhookAttempt) == 0
    assert await count(hooks, WebhookSecret) == 1
    await hooks.deliver()
    assert (await hooks.delivery(kept))["status"] == "delivered"


async def test_finding_what_is_due_costs_no_more_with_a_long_queue(hooks: Hooks) -> None:
    """A dead receiver's backlog is not read."""
    endpoints = [(await hooks.add("https://example.com"))["id"] for _ in range(3)]
    await hooks.tell()

    async def fastest() -> float:
        took = []
        for _ in range(5):
            async with hooks.database.read() as session:
                began = time.perf_counter()
                due = await due_endpoints(session, now_ms())
                took.append(time.perf_counter() - began)
            assert {each.id for each in due} == set(endpoints)
        return min(took)

    await _pile_up(hooks, endpoints[0], 100)
    short = await fastest()
    await _pile_up(hooks, endpoints[0], 20_000)
    assert await fastest() < 20 * short  # reading it all would cost 200 times
    async with hooks.database.write() as session:
        claims = await claim(session, {endpoints[0]: 4, endpoints[1]: 4}, now_ms(), 60_000)
    assert sorted(each.endpoint_id for each in claims) == sorted(
        [endpoints[0]] * 4 + endpoints[1:2]
    )


async def _pile_up(hooks: Hooks, endpoint_id: str, many: int) -> None:
    """So many deliveries, each of an event of its own."""
    now = now_ms()
    owner = {"tenant_id": hooks.tenant_id}
    events = [
        {"id": new_id("evt"), "type": "batch.failed", "body": "{}", "created_at": now, **owner}
        for _ in range(many)
    ]
    deliveries = [
        service.delivery_row(event["id"], hooks.tenant_id, Target(endpoint_id), now)
        for event in events
    ]
    async with hooks.database.write() as session:
        await insert_new(session, WebhookEvent, events)
        await insert_new(session, WebhookDelivery, deliveries)
