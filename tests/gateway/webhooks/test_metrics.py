"""What operators see of webhooks: every attempt and end counted once, and nobody named."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from sqlalchemy import select, update

from gateway.kit.clock import now_ms
from gateway.models import WebhookDelivery, WebhookEndpoint
from gateway.webhooks import backlog
from gateway.webhooks.metrics import RESULTS
from gateway.webhooks.upkeep import keep_webhooks
from tests.gateway.test_ops import value
from tests.gateway.webhooks.conftest import Hooks, Receiver, close, hang, impatience, status
from worker.queue.redis import connect


async def scrape(http: httpx.AsyncClient) -> str:
    answer = await http.get("/metrics")
    assert answer.status_code == 200
    return answer.text


def by(text: str, name: str, label: str, values: tuple[str, ...]) -> dict[str, float]:
    """Those that are not nothing."""
    found = {each: value(text, name, **{label: each}) for each in values}
    return {each: count for each, count in found.items() if count}


def attempts(text: str) -> dict[str, float]:
    return by(text, "batten_webhook_attempts_total", "result", RESULTS)


def ended(text: str) -> dict[str, float]:
    return by(text, "batten_webhook_deliveries_total", "state", ("delivered", "failed"))


def pending(text: str) -> dict[str, float]:
    return by(text, "batten_webhook_pending", "state", ("due", "waiting", "held"))


def endpoints(text: str) -> dict[str, float]:
    states = ("healthy", "failing", "paused", "disabled")
    return by(text, "batten_webhook_endpoints", "state", states)


async def test_attempts_and_ends_are_counted(
    hooks: Hooks, receiver: Receiver, http: httpx.AsyncClient
) -> None:
    receiver.answers = {
        "/down": status(503),
        "/moved": status(302),
        "/gone": status(410),
        "/odd": status(199 + 500),
        "/close": close,
        "/slow": hang,
    }
    assert attempts(await scrape(http)) == {}
    for path in ("/ok", *receiver.answers):
        await hooks.add(receiver.url(path))
    assert endpoints(await scrape(http)) == {"healthy": 7}
    event_id = await hooks.tell()
    assert pending(await scrape(http)) == {"due": 7}
    with impatience(hooks.context):
        assert await hooks.deliver() == 7
    text = await scrape(http)
    assert attempts(text) == {
        "2xx": 1,
        "3xx": 1,
        "4xx": 1,
        "5xx": 1,
        "other": 1,
        "connection_lost": 1,
        "timeout": 1,
    }
    assert ended(text) == {"delivered": 1, "failed": 1}
    assert pending(text) == {"waiting": 5}
    assert endpoints(text) == {"healthy": 1, "failing": 5, "disabled": 1}
    assert value(text, "batten_webhook_attempt_seconds_count") == 7
    assert value(text, "batten_webhook_delivery_seconds_count") == 1
    for secret in (hooks.tenant_id, event_id, receiver.url("/ok"), "127.0.0.1"):
        assert secret not in text


async def test_what_waits_and_since_when(
    hooks: Hooks, receiver: Receiver, http: httpx.AsyncClient
) -> None:
    receiver.answers["/down"] = status(500)
    down = await hooks.add(receiver.url("/down"))
    assert value(await scrape(http), "batten_webhook_overdue_seconds") == 0
    await hooks.tell()
    async with hooks.database.write() as session:
        due = now_ms() - 90_000
        await session.execute(update(WebhookDelivery).values(next_attempt_at=due))
    assert value(await scrape(http), "batten_webhook_overdue_seconds") >= 90
    async with hooks.database.write() as session:
        paused = {"failures": 9, "failing_since": 1, "paused_until": now_ms() + 10**6}
        await session.execute(update(WebhookEndpoint).values(**paused))
    text = await scrape(http)
    assert (pending(text), endpoints(text)) == ({"held": 1}, {"paused": 1})
    assert value(text, "batten_webhook_overdue_seconds") == 0
    await hooks.client.delete(f"/v1/webhook_endpoints/{down['id']}")
    text = await scrape(http)
    assert (pending(text), endpoints(text)) == ({}, {})


async def test_a_scrape_counts_no_more_than_the_oldest(
    hooks: Hooks, receiver: Receiver, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "COUNTED", 2)
    await hooks.add(receiver.url())
    *_, newest = [await hooks.tell() for _ in range(3)]
    async with hooks.database.write() as session:
        late = {"next_attempt_at": now_ms() - 90_000, "expires_at": now_ms() + 10**9}
        of_newest = WebhookDelivery.event_id == newest
        await session.execute(update(WebhookDelivery).where(of_newest).values(**late))
    text = await scrape(http)
    assert pending(text) == {"due": 2}
    assert value(text, "batten_webhook_overdue_seconds") >= 90


async def test_a_scrape_counts_no_more_endpoints_than_that(
    hooks: Hooks, receiver: Receiver, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "COUNTED", 2)
    for _ in range(3):
        await hooks.add(receiver.url())
    assert endpoints(await scrape(http)) == {"healthy": 2}


async def test_deliveries_that_run_out_of_time_have_failed(
    hooks: Hooks, receiver: Receiver, http: httpx.AsyncClient
) -> None:
    await hooks.add(receiver.url())
    for _ in range(3):
        await hooks.tell()
    async with hooks.database.write() as session:
        await session.execute(update(WebhookDelivery).values(expires_at=1))
    for _ in range(2):
        await keep_webhooks(hooks.context)
        assert ended(await scrape(http)) == {"failed": 3}


async def test_a_job_url_is_no_endpoint_and_its_attempts_count(
    hooks: Hooks, receiver: Receiver, http: httpx.AsyncClient, deployment: Any
) -> None:
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 2}
    job = {"endpoint": "/v1/completions", "body": body, "webhook": receiver.url("/job")}
    assert (await hooks.client.post("/v1/jobs", json=job)).status_code == 202
    await deployment.finish_all()
    assert await hooks.deliver() == 1
    text = await scrape(http)
    assert (attempts(text), endpoints(text)) == ({"2xx": 1}, {})
    async with hooks.database.read() as session:
        assert (await session.scalars(select(WebhookEndpoint.kind))).all() == ["origin"]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_sending_goes_on_while_redis_is_away(
    hooks: Hooks, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counting is lost then, and nothing else."""
    await hooks.add(receiver.url())
    event_id = await hooks.tell()
    nowhere = connect("redis://127.0.0.1:1/0", 1)
    monkeypatch.setattr(hooks.context.queues.statistics, "_client", nowhere)
    assert await hooks.deliver() == 1
    await nowhere.aclose()
    assert (await hooks.delivery(event_id))["status"] == "delivered"
