"""Endpoints and events over HTTP, with the official client where it can."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from sqlalchemy import select, text
from standardwebhooks import Webhook, WebhookVerificationError

from gateway.kit.tasks import RecordedTasks
from gateway.models import IdempotencyKey, WebhookSecret
from gateway.webhooks.events import EVENT_TYPES
from gateway.webhooks.secrets import WrongSecretKey, reveal
from tests.gateway.webhooks import conftest as receivers
from tests.gateway.webhooks.conftest import Hooks, Receiver, status

URL = "https://example.com/hook"


async def test_the_official_client_keeps_endpoints(
    openai_client: AsyncOpenAI, receiver: Receiver
) -> None:
    webhooks = openai_client.webhooks
    wanted = ["batch.completed", "batch.failed"]
    made = await webhooks.create(name="mine", url=receiver.url(), event_types=wanted)
    assert made.object == "webhook_endpoint"
    assert made.signing_secret.startswith("whsec_")
    assert made.signing_secret_hint is not None
    assert made.signing_secret_hint.rpartition("…")[2] in made.signing_secret
    shown = await webhooks.retrieve(made.id)
    assert (shown.name, shown.url, shown.event_types) == ("mine", receiver.url(), wanted)
    assert "signing_secret" not in shown.model_dump()
    changed = await webhooks.update(made.id, name="ours", event_types=["batch.failed"])
    assert (changed.name, changed.url) == ("ours", receiver.url())
    assert changed.event_types == ["batch.failed"]
    other = await webhooks.create(name="", url=URL, event_types=["batch.failed"])
    listed = [each.id async for each in webhooks.list(limit=1)]
    assert listed == [other.id, made.id]
    assert (await webhooks.test(made.id, event_type="batch.failed")).status_code == 200
    [got] = receiver.received
    event = webhooks.unwrap(got.body, got.headers, secret=made.signing_secret)
    assert event.type == "batch.failed"
    rotated = await webhooks.rotate_secret(made.id, keep_old_secret_active_for_24_hours=True)
    assert rotated.signing_secret != made.signing_secret
    deleted = await webhooks.delete(made.id)
    assert (deleted.id, deleted.deleted) == (made.id, True)
    with pytest.raises(openai.NotFoundError):
        await webhooks.retrieve(made.id)
    assert [each.id async for each in webhooks.list()] == [other.id]
    types = await webhooks.event_types.list()
    assert types.data == list(EVENT_TYPES)


@pytest.mark.parametrize(
    ("wanted", "param", "code"),
    [
        ({}, "url", "missing_required_parameter"),
        ({"url": 7}, "url", "invalid_type"),
        ({"url": "gopher://example.com"}, "url", "invalid_value"),
        ({"url": URL, "event_types": []}, "event_types", "invalid_value"),
        ({"url": URL, "event_types": ["batch.done"]}, "event_types[0]", "invalid_value"),
        ({"url": URL, "name": "a\0b"}, "name", "invalid_value"),
        ({"url": URL, "secret": "x"}, "secret", "unknown_parameter"),
    ],
)
async def test_a_bad_endpoint_is_refused_by_name(
    client: httpx.AsyncClient, wanted: dict[str, Any], param: str, code: str
) -> None:
    answer = await client.post("/v1/webhook_endpoints", json=wanted)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"].partition(".literal")[0], error["code"]) == (param, code)


async def test_a_tenant_has_so_many_endpoints(
    hooks: Hooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(hooks.context.settings.__dict__, "webhook_endpoints", 2)
    first = await hooks.add(URL)
    await hooks.add(URL)
    refused = await hooks.client.post("/v1/webhook_endpoints", json={"url": URL})
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "webhook_endpoint_limit_exceeded"
    await hooks.client.delete(f"/v1/webhook_endpoints/{first['id']}")
    await hooks.add(URL)


async def test_scopes(
    app: Any, make_tenant: Any, http: httpx.AsyncClient, client: httpx.AsyncClient
) -> None:
    reader = await make_tenant(scopes=["webhook_endpoints:read", "webhook_events:read"])
    for path in ("/webhook_endpoints", "/webhook_events", "/webhook_event_types"):
        assert (await http.get(f"/v1{path}", headers=reader.headers)).status_code == 200
    for path in ("/webhook_endpoints", "/webhook_endpoints/x/rotate_secret"):
        refused = await http.post(f"/v1{path}", json={"url": URL}, headers=reader.headers)
        assert refused.status_code == 403
    writer = await make_tenant(scopes=["webhook_endpoints:write"])
    answer = await http.post("/v1/webhook_endpoints", json={"url": URL}, headers=writer.headers)
    assert answer.status_code == 200
    assert (await http.get("/v1/webhook_events", headers=writer.headers)).status_code == 403


async def test_secrets_are_stored_nowhere(hooks: Hooks) -> None:
    """Not even for who repeats a call."""
    key = {"Idempotency-Key": "once"}
    path = "/v1/webhook_endpoints"
    first, again = [await hooks.client.post(path, json={"url": URL}, headers=key) for _ in range(2)]
    assert first.json() == again.json()
    assert again.headers["idempotent-replayed"] == "true"
    rotate = f"{path}/{first.json()['id']}/rotate_secret"
    rotated, repeated = [await hooks.client.post(rotate, headers=key) for _ in range(2)]
    assert rotated.json() == repeated.json()
    revealed = {first.json()["signing_secret"], rotated.json()["signing_secret"]}
    assert len(revealed) == 2
    default = (await hooks.client.post(f"{path}/default/rotate_secret")).json()
    revealed.add(default["signing_secret"])
    async with hooks.database.read() as session:
        keys = list(await session.scalars(select(IdempotencyKey)))
        rows = [tuple(row) for row in await session.execute(text("SELECT * FROM webhook_secrets"))]
    assert len(keys) == 2
    kept = json.dumps([key.response for key in keys]) + repr(rows)
    for secret in revealed:
        assert secret not in kept
        assert secret.removeprefix("whsec_")[:20] not in kept


async def test_another_deployments_key_reveals_nothing(hooks: Hooks) -> None:
    await hooks.add(URL)
    async with hooks.database.read() as session:
        row = (await session.scalars(select(WebhookSecret))).one()
    assert reveal(hooks.context.secret_key, row).hint == row.hint
    with pytest.raises(WrongSecretKey):
        reveal(b"another" * 8, row)


def verified(secret: str, got: receivers.Received) -> bool:
    try:
        Webhook(secret).verify(got.body, got.headers)
    except WebhookVerificationError:
        return False
    return True


async def test_two_secrets_sign_while_receivers_change_over(
    hooks: Hooks, receiver: Receiver
) -> None:
    made = await hooks.add(receiver.url())
    path = f"/v1/webhook_endpoints/{made['id']}/rotate-secret"

    async def rotate(**wanted: Any) -> str:
        return str((await hooks.client.post(path, json=wanted)).json()["signing_secret"])

    async def accepted(*secrets: str) -> list[bool]:
        await hooks.tell()
        await hooks.deliver()
        return [verified(secret, receiver.received[-1]) for secret in secrets]

    first = made["signing_secret"]
    second = await rotate()
    assert await accepted(first, second) == [True, True]
    assert len(receiver.received[-1].headers["webhook-signature"].split()) == 2
    third = await rotate(overlap_seconds=60)
    assert await accepted(first, second, third) == [False, True, True]
    fourth = await rotate(keep_old_secret_active_for_24_hours=False)
    assert await accepted(first, second, third, fourth) == [False, False, False, True]
    assert (await hooks.get(made["id"]))["signing_secret_hint"][-4:] == fourth[-5:-1]


async def test_a_test_says_when_nobody_answered(hooks: Hooks, receiver: Receiver) -> None:
    receiver.answers["/hang"] = receivers.hang
    receiver.answers["/sad"] = status(500)
    for path, code in (("/hang", 400), ("/sad", 200)):
        made = await hooks.add(receiver.url(path))
        with receivers.impatience(hooks.context) if path == "/hang" else nullcontext():
            answer = await hooks.client.post(f"/v1/webhook_endpoints/{made['id']}/test")
        assert answer.status_code == code, answer.text
        if code == 200:
            assert answer.json()["status_code"] == 500
        else:
            assert answer.json()["error"]["code"] == "webhook_endpoint_unreachable"
            assert "timeout" in answer.json()["error"]["message"]
    assert (await hooks.client.get("/v1/webhook_events")).json()["data"] == []


async def test_events_are_listed_by_type_and_page(hooks: Hooks) -> None:
    ids = [await hooks.tell("batch.completed", f"batch_{n}") for n in range(3)]
    failed = await hooks.tell("job.failed", "job_1")
    path = "/v1/webhook_events"
    every = (await hooks.client.get(path)).json()
    assert [each["id"] for each in every["data"]] == [failed, *reversed(ids)]
    assert every["data"][0]["data"] == {"id": "job_1"}
    some = (await hooks.client.get(path, params={"type": "batch.completed", "limit": 2})).json()
    assert ([each["id"] for each in some["data"]], some["has_more"]) == ([ids[2], ids[1]], True)
    rest = {"type": "batch.completed", "after": some["last_id"]}
    assert [each["id"] for each in (await hooks.client.get(path, params=rest)).json()["data"]] == [
        ids[0]
    ]
    assert (await hooks.client.get(path, params={"type": "x"})).status_code == 400


async def test_an_event_is_sent_again_on_request(
    hooks: Hooks, receiver: Receiver, tasks: RecordedTasks
) -> None:
    told = await hooks.add(receiver.url("/told"))
    event_id = await hooks.tell()
    late = await hooks.add(receiver.url("/late"), event_types=["job.failed"])
    await hooks.deliver()
    path = f"/v1/webhook_events/{event_id}/redeliver"
    again = await hooks.client.post(path, headers={"Idempotency-Key": "k"})
    assert again.status_code == 200
    assert again.json() == (await hooks.client.post(path, headers={"Idempotency-Key": "k"})).json()
    assert ("webhooks.deliver",) in tasks.sent
    [delivery] = again.json()["data"]
    assert (delivery["webhook_endpoint_id"], delivery["status"]) == (told["id"], "pending")
    assert await hooks.deliver() == 1
    first, second = receiver.at("/told")
    assert (first.id, first.body) == (second.id, second.body)
    assert [each["number"] for each in (await hooks.delivery(event_id))["attempts"]] == [1, 2]
    to_late = await hooks.client.post(path, json={"webhook_endpoint_id": late["id"]})
    assert [each["url"] for each in to_late.json()["data"]] == [receiver.url("/late")]
    assert await hooks.deliver() == 1
    assert [got.id for got in receiver.at("/late")] == [event_id]
    assert len(await hooks.deliveries(event_id)) == 2


async def test_what_cannot_be_sent_again(hooks: Hooks, other_client: httpx.AsyncClient) -> None:
    event_id = await hooks.tell()
    path = f"/v1/webhook_events/{event_id}/redeliver"
    nobody = await hooks.client.post(path)
    assert (nobody.status_code, nobody.json()["error"]["code"]) == (409, "nothing_to_redeliver")
    theirs = (await other_client.post("/v1/webhook_endpoints", json={"url": URL})).json()
    for unknown in ("we_unknown", theirs["id"]):
        answer = await hooks.client.post(path, json={"webhook_endpoint_id": unknown})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "webhook_endpoint_id"
    made = await hooks.add(URL)
    await hooks.client.patch(f"/v1/webhook_endpoints/{made['id']}", json={"enabled": False})
    disabled = await hooks.client.post(path, json={"webhook_endpoint_id": made["id"]})
    assert disabled.status_code == 409
    assert disabled.json()["error"]["code"] == "webhook_endpoint_disabled"
