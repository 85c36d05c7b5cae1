"""From an event to a receiver, whatever the receiver does."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from openai import AsyncOpenAI
from openai.types.webhooks import BatchCompletedWebhookEvent
from sqlalchemy import select
from standardwebhooks import Webhook

from gateway.models import WebhookAttempt, WebhookDelivery
from gateway.webhooks import delivery as delivery_module
from gateway.webhooks.delivery import Deliverer, deliver
from gateway.webhooks.events import EVENT_TYPES
from gateway.webhooks.schedule import DELAYS_MS, JITTER
from gateway.webhooks.sending import Sender
from tests.gateway.webhooks import conftest as receivers
from tests.gateway.webhooks.conftest import Hooks, Receiver, data_id, status, until

on_sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
"""For what does not depend on the database."""


BUSY_SECONDS = 60
"""How late a busy machine may be."""


def planned_for(delivery: dict[str, Any], seconds: int) -> bool:
    """Whether the second attempt is so long after the first, give or take the jitter."""
    planned = delivery["next_attempt_at"] - delivery["attempts"][0]["at"]
    return seconds * 0.9 - 1 <= planned <= seconds * 1.1 + BUSY_SECONDS


async def end(task: asyncio.Task[int]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_what_is_delivered_is_what_both_verifiers_accept(
    hooks: Hooks, receiver: Receiver, openai_client: AsyncOpenAI
) -> None:
    made = await hooks.add(receiver.url())
    secret = made["signing_secret"]
    for event_type in EVENT_TYPES:
        event_id = await hooks.tell(event_type, "object_1")
        assert await hooks.deliver() == 1
        got = receiver.received[-1]
        event = openai_client.webhooks.unwrap(got.body, got.headers, secret=secret)
        assert (event.id, event.type, event.data.id) == (event_id, event_type, "object_1")
        if event_type == "batch.completed":
            assert isinstance(event, BatchCompletedWebhookEvent)
        assert Webhook(secret).verify(got.body, got.headers) == json.loads(got.body)
        assert got.headers["content-type"] == "application/json"
        assert got.headers["user-agent"].startswith("Batten-Webhooks/")
        shown = (await hooks.client.get(f"/v1/webhook_events/{event_id}")).json()
        assert shown == json.loads(got.body)
    done = await hooks.delivery(event_id)
    assert (done["status"], done["url"]) == ("delivered", receiver.url())
    assert done["webhook_endpoint_id"] == made["id"]
    [attempt] = done["attempts"]
    assert (attempt["number"], attempt["status_code"], attempt["error"]) == (1, 200, None)
    assert await hooks.deliver() == 0


@on_sqlite
@pytest.mark.parametrize("code", [200, 204, 299])
async def test_only_2xx_is_success(hooks: Hooks, receiver: Receiver, code: int) -> None:
    receiver.answers["/hook"] = status(code)
    await hooks.add(receiver.url("/hook"))
    event_id = await hooks.tell()
    await hooks.deliver()
    assert (await hooks.delivery(event_id))["status"] == "delivered"


FAILURES = [
    (status(500), 500, None),
    (status(404), 404, None),
    (status(302, location="/ok"), 302, None),
    (status(304), 304, None),
    (receivers.hang, None, "timeout"),
    (receivers.hang_in_body, 200, "timeout"),
    (receivers.drip, None, "timeout"),
    (receivers.reset, None, "connection_lost"),
    (receivers.close, None, "connection_lost"),
    (receivers.nonsense, None, "connection_lost"),
    (receivers.endless_headers, None, "connection_lost"),
]


@on_sqlite
@pytest.mark.parametrize(("answer", "code", "error"), FAILURES)
async def test_everything_else_is_tried_again(
    hooks: Hooks, receiver: Receiver, answer: Any, code: int | None, error: str | None
) -> None:
    receiver.answers["/hook"] = answer
    await hooks.add(receiver.url("/hook"))
    event_id = await hooks.tell()
    with receivers.impatience(hooks.context) if error == "timeout" else nullcontext():
        assert await hooks.deliver() == 1
    failed = await hooks.delivery(event_id)
    assert failed["status"] == "pending"
    [attempt] = failed["attempts"]
    assert (attempt["status_code"], attempt["error"]) == (code, error)
    assert planned_for(failed, 5)
    assert receiver.at("/ok") == []
    receiver.answers.clear()
    await hooks.time_passes()
    assert await hooks.deliver() == 1
    assert (await hooks.delivery(event_id))["status"] == "delivered"
    first, second = receiver.received
    assert (first.id, first.body) == (second.id, second.body)


@on_sqlite
async def test_nobody_listens(hooks: Hooks, receiver: Receiver, unused_tcp_port: int) -> None:
    await hooks.add(f"http://127.0.0.1:{unused_tcp_port}/")
    event_id = await hooks.tell()
    await hooks.deliver()
    [attempt] = (await hooks.delivery(event_id))["attempts"]
    assert (attempt["status_code"], attempt["error"]) == (None, "connection_failed")


@on_sqlite
async def test_an_endless_answer_is_read_no_further_than_a_limit(
    hooks: Hooks, receiver: Receiver
) -> None:
    receiver.answers["/hook"] = receivers.endless
    await hooks.add(receiver.url("/hook"))
    event_id = await hooks.tell()
    await hooks.deliver()
    assert (await hooks.delivery(event_id))["status"] == "delivered"


async def test_the_whole_schedule(hooks: Hooks, receiver: Receiver) -> None:
    receiver.answers["/hook"] = status(500)
    await hooks.add(receiver.url("/hook"))
    event_id = await hooks.tell()
    for delay in [*DELAYS_MS[1:], None]:
        await hooks.time_passes()
        assert await hooks.deliver() == 1
        async with hooks.database.read() as session:
            row = (await session.scalars(select(WebhookDelivery))).one()
            attempt = await session.get_one(WebhookAttempt, (row.id, row.attempts))
        if delay is not None:
            planned = row.next_attempt_at - attempt.at - attempt.duration_ms
            assert (1 - JITTER) * delay <= planned <= (1 + JITTER) * delay + BUSY_SECONDS * 1000
    failed = await hooks.delivery(event_id)
    assert (failed["status"], failed["next_attempt_at"]) == ("failed", None)
    assert [each["number"] for each in failed["attempts"]] == list(range(1, 11))
    await hooks.time_passes()
    assert await hooks.deliver() == 0
    assert len({(got.id, got.body) for got in receiver.received}) == 1
    assert len(receiver.received) == 10


def in_seconds(seconds: int) -> str:
    return format_datetime(datetime.now(UTC) + timedelta(seconds=seconds), usegmt=True)


@pytest.mark.parametrize(
    ("code", "asked", "wait", "pause"),
    [(429, "1800", 1800, 1800), (503, "a date", 1800, 1800), (429, "9" * 9999, 86_400, 3600)],
)
async def test_retry_after_is_honoured(
    hooks: Hooks, receiver: Receiver, code: int, asked: str, wait: int, pause: int
) -> None:
    asked = in_seconds(wait) if asked == "a date" else asked
    receiver.answers["/hook"] = status(code, retry_after=asked)
    made = await hooks.add(receiver.url("/hook"))
    event_id = await hooks.tell()
    await hooks.deliver()
    failed = await hooks.delivery(event_id)
    assert planned_for(failed, wait)
    paused = (await hooks.get(made["id"]))["paused_until"]
    assert pause - 1 <= paused - failed["attempts"][0]["at"] <= pause + BUSY_SECONDS
    await hooks.tell()
    assert await hooks.deliver() == 0  # others wait too


@on_sqlite
@pytest.mark.parametrize("asked", ["soon", "-5", "1.5", "Thu, 99 Foo", "", in_seconds(-9), "٣"])
async def test_a_retry_after_that_asks_for_nothing(
    hooks: Hooks, receiver: Receiver, asked: str
) -> None:
    receiver.answers["/hook"] = status(503, retry_after=asked)
    made = await hooks.add(receiver.url("/hook"))
    event_id = await hooks.tell()
    await hooks.deliver()
    failed = await hooks.delivery(event_id)
    assert [each["status_code"] for each in failed["attempts"]] == [503]
    assert planned_for(failed, 5)
    assert (await hooks.get(made["id"]))["paused_until"] is None


async def test_410_disables_until_the_tenant_says_otherwise(
    hooks: Hooks, receiver: Receiver
) -> None:
    receiver.answers["/hook"] = status(410)
    made = await hooks.add(receiver.url("/hook"))
    gone, waiting = await hooks.tell(), None
    await hooks.deliver()
    assert (await hooks.delivery(gone))["status"] == "failed"
    shown = await hooks.get(made["id"])
    assert (shown["status"], shown["disabled_reason"]) == ("disabled", "gone")
    waiting = await hooks.tell()
    assert await hooks.deliveries(waiting) == []
    path = f"/v1/webhook_endpoints/{made['id']}"
    again = (await hooks.client.post(path, json={"enabled": True})).json()
    assert (again["status"], again["disabled_reason"]) == ("enabled", None)
    receiver.answers.clear()
    event_id = await hooks.tell()
    await hooks.deliver()
    assert (await hooks.delivery(event_id))["status"] == "delivered"


async def test_a_claim_is_made_once(hooks: Hooks, receiver: Receiver) -> None:
    """However many processes deliver at the same time."""
    await hooks.add(receiver.url())
    events = [await hooks.tell(id=f"batch_{n}") for n in range(30)]
    senders = [Sender(hooks.context.settings) for _ in range(3)]
    deliverers = [Deliverer(hooks.context, sender) for sender in senders]
    await asyncio.gather(*(each.take_for(20) for each in deliverers))
    assert sum(each.attempts for each in deliverers) == 30
    assert sorted(got.id for got in receiver.received) == sorted(events)
    for sender in senders:
        await sender.close()


async def test_one_process_of_a_directory_delivers(hooks: Hooks, receiver: Receiver) -> None:
    receiver.answers["/hang"] = receivers.hang
    await hooks.add(receiver.url("/hang"))
    await hooks.tell()
    first = asyncio.create_task(hooks.deliver())
    await until(lambda: len(receiver.received) == 1)
    assert await hooks.deliver() == 0
    await end(first)


async def test_a_crash_between_sending_and_recording_sends_again(
    hooks: Hooks, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    await hooks.add(receiver.url())
    event_id = await hooks.tell()

    async def crash(*_: Any) -> None:
        raise KeyError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(delivery_module, "record_outcomes", crash)
        with pytest.raises(KeyError):
            await hooks.deliver()
    assert (await hooks.delivery(event_id))["attempts"] == []
    assert await hooks.deliver() == 0  # its lease runs
    await hooks.time_passes()
    assert await hooks.deliver() == 1
    first, second = receiver.received
    assert (first.id, first.body) == (second.id, second.body) == (event_id, second.body)
    done = await hooks.delivery(event_id)
    assert (done["status"], [each["number"] for each in done["attempts"]]) == ("delivered", [2])


async def test_a_late_outcome_does_not_undo_a_redelivery(hooks: Hooks, receiver: Receiver) -> None:
    receiver.answers["/hook"] = receivers.hang
    await hooks.add(receiver.url("/hook"))
    event_id = await hooks.tell()
    with receivers.impatience(hooks.context):
        running = asyncio.create_task(hooks.deliver())
        await until(lambda: len(receiver.received) == 1)
        receiver.answers.clear()
        again = await hooks.client.post(f"/v1/webhook_events/{event_id}/redeliver")
        assert again.status_code == 200
        await running
    await hooks.deliver()
    done = await hooks.delivery(event_id)
    assert done["status"] == "delivered"
    assert [each["error"] for each in done["attempts"]] == ["timeout", None]


async def test_slow_receivers_hold_up_nobody_else(hooks: Hooks, receiver: Receiver) -> None:
    receiver.answers["/hang"] = receivers.hang
    await hooks.add(receiver.url("/hang"), event_types=["batch.failed"])
    await hooks.add(receiver.url("/ok"), event_types=["batch.completed"])
    for _ in range(10):
        await hooks.tell("batch.failed")
    for n in range(20):
        await hooks.tell("batch.completed", f"batch_{n}")
    running = asyncio.create_task(deliver(hooks.context))
    await until(lambda: len(receiver.at("/ok")) == 20)
    assert not running.done()
    assert len(receiver.at("/hang")) == 4
    await end(running)
    assert {data_id(got) for got in receiver.at("/ok")} == {f"batch_{n}" for n in range(20)}
