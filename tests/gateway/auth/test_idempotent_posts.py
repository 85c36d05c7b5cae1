"""Every POST of the API: with an `Idempotency-Key` it does its work once, or it is named here."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import select

from gateway.app import ROUTERS
from gateway.auth.idempotency import OPERATORS
from gateway.kit.clock import now_ms
from gateway.models import Adapter, AdapterRevision, Base, IdempotencyKey
from gateway.webhooks.service import record
from worker.protocol.types import Capacity, WorkerLimits
from worker.queue.base import WorkerInfo

# Done twice they change nothing more, or they store nothing.
WITHOUT = {
    "/v1/batches/estimate",
    "/v1/batches/{batch_id}/cancel",
    "/v1/jobs/{job_id}/cancel",
    "/v1/webhook_endpoints/{webhook_endpoint_id}/test",
    "/v1/admin/dead_letters/{request_id}/requeue",
}
COMPLETION = {"model": "tiny", "prompt": "Hi", "max_tokens": 2}
LINE = {"method": "POST", "url": "/v1/completions", "body": COMPLETION}
WINDOW = {"endpoint": "/v1/completions", "completion_window": "24h"}


SECRETS = {
    "/v1/admin/keys": "secret",
    "/v1/admin/keys/{key_id}/rotate": "secret",
    "/v1/webhook_endpoints": "signing_secret",
    "/v1/webhook_endpoints/{webhook_endpoint_id}/rotate_secret": "signing_secret",
}
"""Where an answer shows one, by its name there."""


def posts() -> list[str]:
    routes = [route for router in ROUTERS for route in router.routes]
    return sorted(
        route.path.replace(":path}", "}")  # type: ignore[attr-defined]
        for route in routes
        if "POST" in route.methods  # type: ignore[attr-defined]
    )


@dataclass(frozen=True)
class World:
    """Who asks, and what there is to ask about."""

    deployment: Any
    client: httpx.AsyncClient
    admin: httpx.AsyncClient
    tenant: Any


@dataclass(frozen=True)
class Call:
    """What to send to a path, its parameters filled in; `other` is another body."""

    body: Mapping[str, Any] | None = None
    other: Mapping[str, Any] = field(default_factory=lambda: {"other": 1})
    parameters: Mapping[str, str] = field(default_factory=dict)
    form: Mapping[str, Any] | None = None


async def made_adapter(world: World, tenant_id: str | None) -> Mapping[str, str]:
    """With two ready revisions."""
    async with world.deployment.context.database.write() as session:
        adapter = Adapter(
            id="adapter_1", tenant_id=tenant_id, name="a/b", base_model="tiny", created_at=now_ms()
        )
        session.add(adapter)
        await session.flush()
        for number in (1, 2):
            revision = AdapterRevision(
                id=f"adrev_{number}",
                adapter_id=adapter.id,
                tenant_id=tenant_id,
                number=number,
                status="ready",
                upload_key="uploads/none",
                created_at=now_ms(),
            )
            session.add(revision)
        adapter.promoted_revision_id = "adrev_2"
    return {"adapter": "a/b"}


async def made_endpoint(world: World) -> Mapping[str, str]:
    answer = await world.client.post("/v1/webhook_endpoints", json={"url": "https://example.com"})
    return {"webhook_endpoint_id": answer.json()["id"]}


async def made_event(world: World) -> Mapping[str, str]:
    await made_endpoint(world)
    async with world.deployment.context.database.write() as session:
        await record(session, world.tenant.tenant_id, "batch.completed", {"id": "batch_1"})
    [event] = (await world.client.get("/v1/webhook_events")).json()["data"]
    return {"webhook_event_id": event["id"]}


async def failed_batch(world: World) -> Mapping[str, str]:
    lines = [{**LINE, "custom_id": "a"}]
    batch = (await world.client.post("/v1/batches", json={**WINDOW, "requests": lines})).json()
    await world.deployment.control()
    await world.deployment.dispatch()
    [lease] = await world.deployment.claim()
    await world.deployment.fail(lease, "invalid_request")
    await world.deployment.collect()
    await world.deployment.control()
    return {"batch_id": batch["id"]}


async def billed_job(world: World) -> str:
    wanted = {"endpoint": "/v1/completions", "body": COMPLETION}
    job = (await world.client.post("/v1/jobs", json=wanted)).json()
    await world.deployment.finish_all()
    return str(job["id"])


def always(call: Call) -> Callable[[World], Awaitable[Call]]:
    async def made(world: World) -> Call:
        return call

    return made


async def webhook_update(world: World) -> Call:
    return Call({"name": "one"}, {"name": "two"}, await made_endpoint(world))


async def rotation(world: World) -> Call:
    return Call({}, {"overlap_seconds": 0}, await made_endpoint(world))


async def redelivery(world: World) -> Call:
    return Call({}, {"webhook_endpoint_id": "we_0"}, await made_event(world))


async def retry(world: World) -> Call:
    return Call({}, {"completion_window": "1h"}, await failed_batch(world))


async def promotion(world: World) -> Call:
    parameters = await made_adapter(world, world.tenant.tenant_id)
    return Call({"revision": 1}, {"revision": 2}, parameters)


async def rollback(world: World) -> Call:
    return Call(parameters=await made_adapter(world, world.tenant.tenant_id))


async def shared_promotion(world: World) -> Call:
    return Call({"revision": 1}, {"revision": 2}, await made_adapter(world, None))


async def shared_rollback(world: World) -> Call:
    return Call(parameters=await made_adapter(world, None))


async def grant(world: World) -> Call:
    parameters = await made_adapter(world, None)
    return Call({"tenant": world.tenant.tenant_id}, {"tenant": "nobody"}, parameters)


async def key(world: World) -> Call:
    return Call({"tenant": world.tenant.tenant_id, "name": "one"}, {"admin": True, "name": "two"})


async def key_rotation(world: World) -> Call:
    return Call({}, {"overlap_seconds": 0}, {"key_id": world.tenant.key_id})


async def tenant_update(world: World) -> Call:
    return Call({"weight": 2}, {"weight": 3}, {"tenant": world.tenant.tenant_id})


async def limits(world: World) -> Call:
    named = {"tenant": world.tenant.tenant_id}
    return Call({**named, "adapters": 1}, {**named, "adapters": 2})


async def budget(world: World) -> Call:
    named = {"tenant": world.tenant.tenant_id}
    return Call({**named, "hard_nano": 1}, {**named, "hard_nano": 2})


async def correction(world: World) -> Call:
    request_id = await billed_job(world)
    wanted = {"request_id": request_id, "reason": "a gift"}
    return Call({**wanted, "amount_nano": 5}, {**wanted, "amount_nano": 6})


def batch_form(text: str) -> dict[str, Any]:
    return {"files": {"file": ("in.jsonl", text.encode())}, "data": {"purpose": "batch"}}


def adapter_form(name: str) -> dict[str, Any]:
    files = [
        ("files", ("adapter_config.json", b"{}")),
        ("files", ("adapter_model.safetensors", b"")),
    ]
    return {"files": files, "data": {"name": name}}


def priced(nano: int) -> dict[str, Any]:
    return {"model": "*", "input_nano": nano, "cached_nano": 1, "output_nano": 1}


CALLS: Mapping[str, Callable[[World], Awaitable[Call]]] = {
    "/v1/files": always(Call(form=batch_form(json.dumps(LINE)), other=batch_form("{}"))),
    "/v1/batches": always(
        Call(
            {**WINDOW, "requests": [{**LINE, "custom_id": "a"}]},
            {**WINDOW, "requests": [{**LINE, "custom_id": "b"}]},
        )
    ),
    "/v1/batches/{batch_id}/retry": retry,
    "/v1/jobs": always(
        Call(
            {"endpoint": "/v1/completions", "body": COMPLETION},
            {"endpoint": "/v1/completions", "body": {**COMPLETION, "max_tokens": 3}},
        )
    ),
    "/v1/completions": always(Call(COMPLETION, {**COMPLETION, "prompt": "Ho"})),
    "/v1/chat/completions": always(
        Call(
            {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]},
            {"model": "tiny", "messages": [{"role": "user", "content": "Ho"}]},
        )
    ),
    "/v1/adapters": always(Call(form=adapter_form("a"), other=adapter_form("b"))),
    "/v1/adapters/{adapter}/promote": promotion,
    "/v1/adapters/{adapter}/rollback": rollback,
    "/v1/webhook_endpoints": always(
        Call({"url": "https://example.com/a"}, {"url": "https://example.com/b"})
    ),
    "/v1/webhook_endpoints/{webhook_endpoint_id}": webhook_update,
    "/v1/webhook_endpoints/{webhook_endpoint_id}/rotate_secret": rotation,
    "/v1/webhook_endpoints/{webhook_endpoint_id}/rotate-secret": rotation,
    "/v1/webhook_events/{webhook_event_id}/redeliver": redelivery,
    "/v1/admin/adapters": always(Call(form=adapter_form("a"), other=adapter_form("b"))),
    "/v1/admin/adapters/{adapter}/grants": grant,
    "/v1/admin/adapters/{adapter}/promote": shared_promotion,
    "/v1/admin/adapters/{adapter}/rollback": shared_rollback,
    "/v1/admin/system_prompts": always(
        Call({"model": "tiny", "text": "Once"}, {"model": "tiny", "text": "Twice"})
    ),
    "/v1/admin/tenants": always(Call({"name": "one"}, {"name": "two"})),
    "/v1/admin/tenants/{tenant}": tenant_update,
    "/v1/admin/limits": limits,
    "/v1/admin/keys": key,
    "/v1/admin/keys/{key_id}/rotate": key_rotation,
    "/v1/admin/prices": always(Call(priced(1), priced(2))),
    "/v1/admin/storage_prices": always(Call({"gib_hour_nano": 1}, {"gib_hour_nano": 2})),
    "/v1/admin/budgets": budget,
    "/v1/admin/corrections": correction,
}


@pytest.fixture
async def world(
    deployment: Any, client: httpx.AsyncClient, admin: httpx.AsyncClient, tenant: Any
) -> World:
    limits = WorkerLimits(context_tokens=1024, kv_tokens=100_000, adapter_rank=64)
    free = Capacity(kv_tokens=1, adapter_rank=1, requests=1)
    await deployment.context.queues.directory.announce(WorkerInfo("w", "tiny", limits, free))
    return World(deployment, client, admin, tenant)


async def contents(world: World) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of every table."""
    async with world.deployment.context.database.read() as session:
        return {
            table.name: sorted(map(tuple, await session.execute(select(table))), key=str)
            for table in Base.metadata.sorted_tables
        }


async def send(world: World, path: str, body: Mapping[str, Any] | None) -> httpx.Response:
    """Whatever must work for the answer works meanwhile."""
    client = world.admin if path.startswith("/v1/admin/") else world.client
    is_form = body is not None and "files" in body
    sent = dict(body or {}) if is_form else {"json": body}
    sending = asyncio.create_task(client.post(path, headers={"Idempotency-Key": "k"}, **sent))
    async with asyncio.timeout(20):
        while not sending.done():
            if path.endswith("/completions"):
                await world.deployment.work()
            await asyncio.sleep(0)
    return sending.result()


def test_every_post_is_known() -> None:
    assert CALLS.keys() | WITHOUT == set(posts())
    assert not CALLS.keys() & WITHOUT


def test_the_document_names_the_header_where_it_is_heeded(app: FastAPI) -> None:
    for path, methods in app.openapi()["paths"].items():
        if "post" in methods:
            names = {each["name"] for each in methods["post"].get("parameters", [])}
            assert ("idempotency-key" in names) == (path in CALLS), path


@pytest.mark.parametrize("path", sorted(CALLS))
async def test_a_post_with_the_same_key_is_done_once(world: World, path: str) -> None:
    call = await CALLS[path](world)
    url, body = path.format_map(call.parameters), call.form or call.body
    first = await send(world, url, body)
    assert first.is_success, first.text
    assert "idempotent-replayed" not in first.headers
    before = await contents(world)
    again = await send(world, url, body)
    assert (again.status_code, again.content) == (first.status_code, first.content)
    assert again.headers["idempotent-replayed"] == "true"
    conflict = await send(world, url, call.other)
    assert (conflict.status_code, conflict.json()["error"]["code"]) == (409, "idempotency_conflict")
    assert await contents(world) == before
    [owner] = {row[0] for row in before[IdempotencyKey.__tablename__]}
    assert owner == (OPERATORS if "/admin/" in path else world.tenant.tenant_id)


@pytest.mark.parametrize("action", ["rotate_secret", "rollback"])
async def test_no_body_is_an_empty_one(world: World, action: str) -> None:
    if action == "rollback":
        path = f"/v1/adapters/{(await made_adapter(world, world.tenant.tenant_id))['adapter']}"
    else:
        path = f"/v1/webhook_endpoints/{(await made_endpoint(world))['webhook_endpoint_id']}"
    first = await send(world, f"{path}/{action}", None)
    assert first.is_success, first.text
    again = await send(world, f"{path}/{action}", {})
    assert (again.status_code, again.content) == (first.status_code, first.content)
    assert again.headers["idempotent-replayed"] == "true"


@pytest.mark.parametrize(("path", "name"), SECRETS.items())
async def test_a_secret_is_shown_again_and_stored_nowhere(
    world: World, path: str, name: str
) -> None:
    call = await CALLS[path](world)
    url = path.format_map(call.parameters)
    [secret] = {(await send(world, url, call.body)).json()[name] for _ in range(2)}
    assert len(secret) > 40
    assert secret not in str(await contents(world))
    assert secret.partition("_")[2] not in str(await contents(world))


async def test_a_key_that_is_shown_again_works(world: World, http: httpx.AsyncClient) -> None:
    body = {"tenant": world.tenant.tenant_id, "scopes": ["read"]}
    await send(world, "/v1/admin/keys", body)
    secret = (await send(world, "/v1/admin/keys", body)).json()["secret"]
    answer = await http.get("/v1/files", headers={"Authorization": f"Bearer {secret}"})
    assert answer.status_code == 200


@pytest.mark.parametrize("path", SECRETS)
async def test_a_secret_of_another_deployment_key_is_not_shown_wrongly(
    world: World, path: str
) -> None:
    call = await CALLS[path](world)
    url = path.format_map(call.parameters)
    assert (await send(world, url, call.body)).is_success
    object.__setattr__(world.deployment.context, "secret_key", b"another deployment's secret key.")
    refused = await send(world, url, call.body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "secret_not_available")


async def test_operators_share_their_keys_and_tenants_do_not_see_them(
    world: World, http: httpx.AsyncClient
) -> None:
    second = (await world.admin.post("/v1/admin/keys", json={"admin": True})).json()["secret"]
    first = await send(world, "/v1/admin/tenants", {"name": "one"})
    headers = {"Authorization": f"Bearer {second}", "Idempotency-Key": "k"}
    again = await http.post("/v1/admin/tenants", json={"name": "one"}, headers=headers)
    assert (again.status_code, again.json()) == (201, first.json())
    theirs = {"Idempotency-Key": "k"}
    refused = await world.client.post("/v1/admin/tenants", json={"name": "one"}, headers=theirs)
    assert refused.status_code == 403


@pytest.mark.parametrize("name", [secrets.token_urlsafe(6000), "a%00b", "%F0%9F%98%80", "a//b"])
async def test_a_key_changes_no_answer_to_an_odd_path(world: World, name: str) -> None:
    """Whose characters a database may refuse, or whose length an index."""
    for client, base in ((world.client, "/v1/adapters"), (world.admin, "/v1/admin/adapters")):
        path = f"{base}/{name}/promote"
        wanted = await client.post(path, json={"revision": 1})
        answer = await send(world, path, {"revision": 1})
        assert wanted.status_code in {400, 404}
        assert (answer.status_code, answer.json()) == (wanted.status_code, wanted.json())


@pytest.mark.parametrize("path", ["/v1/adapters/x/rollback", "/v1/jobs"])
async def test_a_form_is_refused_where_json_is_due(world: World, path: str) -> None:
    answer = await world.client.post(path, files={"file": ("a", b"\xff\x00")})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (415, "unsupported_content_type")
