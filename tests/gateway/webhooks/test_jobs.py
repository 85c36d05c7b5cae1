"""A job's own webhook."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from sqlalchemy import func, select
from standardwebhooks import Webhook

from gateway.kit.tasks import RecordedTasks
from gateway.models import WebhookEndpoint, WebhookSecret
from gateway.webhooks.lifecycle import endpoint_for_url
from tests.gateway.webhooks.conftest import Hooks, Receiver, data_id, status

BODY = {"model": "tiny", "prompt": "Hi", "max_tokens": 4}


async def submit(client: httpx.AsyncClient, **wanted: Any) -> httpx.Response:
    job = {"endpoint": "/v1/completions", "body": BODY, **wanted}
    return await client.post("/v1/jobs", json=job)


async def run(deployment: Any) -> None:
    for lease in await deployment.claim():
        await deployment.answer(lease)
    await deployment.collect()


async def test_an_endpoint_is_told_whatever_its_filter(
    hooks: Hooks, receiver: Receiver, deployment: Any, tasks: RecordedTasks
) -> None:
    filtered = await hooks.add(receiver.url("/named"), event_types=["batch.failed"])
    await hooks.add(receiver.url("/all"))
    job = (await submit(hooks.client, webhook=filtered["id"])).json()
    other = (await submit(hooks.client)).json()
    assert (job["webhook"], other["webhook"]) == (filtered["id"], None)
    await run(deployment)
    assert ("webhooks.deliver",) in tasks.sent
    await hooks.deliver()
    assert [data_id(got) for got in receiver.at("/named")] == [job["id"]]
    assert {data_id(got) for got in receiver.at("/all")} == {job["id"], other["id"]}


async def test_a_url_is_signed_for_with_the_default_secret(
    hooks: Hooks, receiver: Receiver, deployment: Any
) -> None:
    path = "/v1/webhook_endpoints/default/rotate_secret"
    shown = (await hooks.client.post(path)).json()
    assert (shown["object"], shown["id"]) == ("webhook_secret", "default")
    urls = [receiver.url("/jobs?n=1"), receiver.url("/jobs?n=2")]
    jobs = [(await submit(hooks.client, webhook=url)).json() for url in urls]
    assert [job["webhook"] for job in jobs] == urls
    await run(deployment)
    await hooks.deliver()
    for job, url in zip(jobs, urls, strict=True):
        [got] = receiver.at(url.removeprefix(receiver.url("")))
        told = Webhook(shown["signing_secret"]).verify(got.body, got.headers)
        assert (told["type"], told["data"]) == ("job.completed", {"id": job["id"]})
    [event, _] = (await hooks.client.get("/v1/webhook_events")).json()["data"]
    delivery = await hooks.delivery(event["id"])
    assert (delivery["webhook_endpoint_id"], delivery["status"]) == (None, "delivered")
    assert delivery["url"] in urls
    assert (await hooks.client.get("/v1/webhook_endpoints")).json()["data"] == []
    async with hooks.database.read() as session:
        rows = select(func.count()).select_from(WebhookEndpoint)
        assert await session.scalar(rows) == 1  # of their origin


async def test_the_default_secret_is_made_with_the_first_url_and_shown_by_rotating(
    hooks: Hooks, receiver: Receiver, deployment: Any
) -> None:
    for _ in range(2):
        await submit(hooks.client, webhook=receiver.url())
    async with hooks.database.read() as session:
        [secret] = await session.scalars(select(WebhookSecret))
    assert (secret.endpoint_id, secret.expires_at) == (None, None)
    path = "/v1/webhook_endpoints/default/rotate_secret"
    shown = (await hooks.client.post(path)).json()["signing_secret"]
    await run(deployment)
    await hooks.deliver()
    assert len(receiver.received) == 2
    for got in receiver.received:
        Webhook(shown).verify(got.body, got.headers)
        assert len(got.headers["webhook-signature"].split()) == 2


async def test_410_ends_the_delivery_and_not_the_origin(
    hooks: Hooks, receiver: Receiver, deployment: Any
) -> None:
    receiver.answers["/gone"] = status(410)
    for _ in range(6):  # more than the circuit breaker would stand
        await submit(hooks.client, webhook=receiver.url("/gone"))
    await submit(hooks.client, webhook=receiver.url("/there"))
    await run(deployment)
    while await hooks.deliver():
        pass
    events = (await hooks.client.get("/v1/webhook_events")).json()["data"]
    found = [await hooks.delivery(event["id"]) for event in events]
    assert sorted((each["url"], each["status"]) for each in found) == [
        *[(receiver.url("/gone"), "failed")] * 6,
        (receiver.url("/there"), "delivered"),
    ]
    await submit(hooks.client, webhook=receiver.url("/there"))
    await run(deployment)
    await hooks.deliver()
    assert len(receiver.at("/there")) == 2


@pytest.mark.parametrize(
    "webhook", ["we_unknown", "", "ftp://example.com/", "https://u:p@a.b/", "x" * 2049]
)
async def test_a_webhook_that_is_none(hooks: Hooks, deployment: Any, webhook: str) -> None:
    answer = await submit(hooks.client, webhook=webhook)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("webhook", "invalid_value")


async def test_another_tenants_endpoint_is_an_unknown_one(
    hooks: Hooks, other_client: httpx.AsyncClient, deployment: Any
) -> None:
    made = await hooks.add("https://example.com")
    theirs = await submit(other_client, webhook=made["id"])
    unknown = await submit(other_client, webhook="we_unknown")
    assert theirs.status_code == 400
    assert theirs.text.replace(made["id"], "we_unknown") == unknown.text


async def test_private_urls_need_the_operators_leave(
    hooks: Hooks, deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(hooks.context.settings.__dict__, "webhook_allow_private", False)
    for url in ("http://example.com/", "https://10.0.0.1/"):
        answer = await submit(hooks.client, webhook=url)
        assert answer.json()["error"]["param"] == "webhook"


async def test_urls_of_two_tenants_share_nothing(hooks: Hooks, other_tenant: Any) -> None:
    ids = set()
    for scope in (other_tenant.scope, type(other_tenant.scope)(hooks.tenant_id)):
        async with hooks.database.write() as session:
            ids.add(await endpoint_for_url(session, hooks.context, scope, "https://example.com/a"))
    assert len(ids) == 2
