"""Every operation of the OpenAPI document, asked with another tenant's ids: the answer is the
one for ids that nobody has."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from gateway.billing.invoices import invoice_id
from gateway.kit.clock import now_ms
from gateway.kit.months import month_of
from gateway.models import Adapter, AdapterRevision
from gateway.webhooks.service import record

Ids = Mapping[str, str]

COMPLETION = {"prompt": "Hi", "max_tokens": 2}
WINDOW = {"endpoint": "/v1/completions", "completion_window": "24h"}

# What else than a path can name somebody's object: a function of ids, by operation.
BODIES: dict[str, Any] = {
    "POST /v1/batches": lambda ids: {**WINDOW, "input_file_id": ids["file_id"]},
    "POST /v1/batches/estimate": lambda ids: {**WINDOW, "input_file_id": ids["file_id"]},
    "POST /v1/batches/{batch_id}/retry": lambda ids: {},
    "POST /v1/jobs": lambda ids: {
        "endpoint": "/v1/completions",
        "body": {**COMPLETION, "model": ids["adapter"]},
    },
    "POST /v1/chat/completions": lambda ids: {
        "model": ids["adapter"],
        "messages": [{"role": "user", "content": "Hi"}],
    },
    "POST /v1/completions": lambda ids: {**COMPLETION, "model": ids["adapter"]},
    "POST /v1/webhook_endpoints/{webhook_endpoint_id}": lambda ids: {"name": "mine"},
    "PATCH /v1/webhook_endpoints/{webhook_endpoint_id}": lambda ids: {"name": "mine"},
    "POST /v1/adapters/{adapter}/promote": lambda ids: {"revision": ids["revision"]},
}
CURSORS = {
    "GET /v1/files": "file_id",
    "GET /v1/batches": "batch_id",
    "GET /v1/jobs": "job_id",
    "GET /v1/invoices": "invoice_id",
    "GET /v1/adapters": "adapter_id",
    "GET /v1/adapters/{adapter}/revisions": "revision_id",
    "GET /v1/webhook_endpoints": "webhook_endpoint_id",
    "GET /v1/webhook_events": "webhook_event_id",
}
OWN_DATA = {
    "GET /v1/models",
    "GET /v1/usage",
    "GET /v1/budget",
    "GET /v1/webhook_event_types",
}  # nothing in them names an object
CREATES = {"POST /v1/files", "POST /v1/adapters", "POST /v1/webhook_endpoints"}  # nothing is named
OPEN = {"GET /healthz", "GET /readyz", "GET /metrics"}
LISTS = ("files", "batches", "jobs", "adapters", "webhook_endpoints", "webhook_events")


@dataclass(frozen=True)
class Operation:
    method: str
    path: str

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def names_objects(self) -> bool:
        return "{" in self.path or self.name in BODIES or self.name in CURSORS

    async def ask(self, client: httpx.AsyncClient, ids: Ids) -> tuple[int, str]:
        """Status and body, with the ids taken out."""
        body = BODIES[self.name](ids) if self.name in BODIES else None
        cursor = CURSORS.get(self.name)
        params = {"after": ids[cursor]} if cursor else None
        path = self.path.format_map(ids)
        answer = await client.request(self.method, path, json=body, params=params)
        text = answer.text
        for name in sorted(ids.keys() - {"revision"}, key=lambda name: -len(ids[name])):
            text = text.replace(ids[name], name)
        return answer.status_code, text


def operations(app: FastAPI) -> Iterator[Operation]:
    for path, methods in app.openapi()["paths"].items():
        for method in methods:
            yield Operation(method.upper(), path)


@pytest.fixture
async def owned(client: httpx.AsyncClient, tenant: Any, deployment: Any) -> Ids:
    """One object of each kind that belongs to `tenant`."""
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    line["body"] = {**COMPLETION, "model": "tiny"}  # type: ignore[assignment]
    files = {"file": ("in.jsonl", json.dumps(line).encode())}
    file = (await client.post("/v1/files", files=files, data={"purpose": "batch"})).json()
    wanted = {**WINDOW, "input_file_id": file["id"]}
    batch = (await client.post("/v1/batches", json=wanted)).json()
    job_body = {"endpoint": "/v1/completions", "body": line["body"]}
    job = (await client.post("/v1/jobs", json=job_body)).json()
    await add_adapter(tenant, deployment)
    hook = (await client.post("/v1/webhook_endpoints", json={"url": "https://example.com"})).json()
    async with deployment.context.database.write() as session:
        await record(session, tenant.tenant_id, "batch.completed", {"id": batch["id"]})
    [event] = (await client.get("/v1/webhook_events")).json()["data"]
    return {
        "webhook_endpoint_id": hook["id"],
        "webhook_event_id": event["id"],
        "file_id": file["id"],
        "batch_id": batch["id"],
        "job_id": job["id"],
        "prompt_id": "sysprompt_00000000",
        "invoice_id": invoice_id(tenant.tenant_id, month_of(now_ms())),
        "request_id": job["id"],
        "key_id": tenant.key_id,
        "tenant": tenant.tenant_id,
        "adapter": "somebodys-adapter",
        "adapter_id": "adapter_00000000",
        "model": "somebodys-adapter",
        "revision": "1",
        "revision_id": "rev_00000000",
    }


async def add_adapter(tenant: Any, deployment: Any) -> None:
    async with deployment.context.database.write() as session:
        adapter = Adapter(
            id="adapter_00000000",
            tenant_id=tenant.tenant_id,
            name="somebodys-adapter",
            base_model="tiny",
            created_at=now_ms(),
        )
        session.add(adapter)
        await session.flush()
        revision = AdapterRevision(
            id="rev_00000000",
            tenant_id=tenant.tenant_id,
            adapter_id=adapter.id,
            number=1,
            status="ready",
            digest="0" * 64,
            upload_key="uploads/none",
            rank=2,
            created_at=now_ms(),
        )
        session.add(revision)
        await session.flush()
        adapter.promoted_revision_id = revision.id


def unknown(ids: Ids) -> Ids:
    """Of the same shape, and nobody's."""
    fixed = {"revision": "1"}
    return {name: fixed.get(name, f"{value[:-4]}zzzz") for name, value in ids.items()}


def readable(app: FastAPI) -> list[Operation]:
    return [
        operation
        for operation in operations(app)
        if operation.method == "GET" and "{" in operation.path and "/admin/" not in operation.path
    ]


async def test_another_tenants_ids_are_unknown_ids(
    app: FastAPI, client: httpx.AsyncClient, other_client: httpx.AsyncClient, owned: Ids
) -> None:
    before = [await operation.ask(client, owned) for operation in readable(app)]
    assert {status for status, _ in before} == {200}
    nobodys, asked = unknown(owned), 0
    for operation in operations(app):
        if operation.name in OWN_DATA | CREATES | OPEN:
            continue
        if "/admin/" in operation.path:
            assert (await operation.ask(other_client, owned))[0] == 403, operation
            continue
        assert operation.names_objects, f"{operation.name}: say here how it names objects"
        theirs = await operation.ask(other_client, owned)
        assert theirs == await operation.ask(other_client, nobodys), operation
        assert theirs[0] in {400, 404}, operation
        asked += 1
    assert asked > 20
    assert [await operation.ask(client, owned) for operation in readable(app)] == before


async def test_lists_show_nothing_of_another_tenant(
    app: FastAPI, other_client: httpx.AsyncClient, owned: Ids
) -> None:
    for name in LISTS:
        assert (await other_client.get(f"/v1/{name}")).json()["data"] == []
    models = (await other_client.get("/v1/models")).json()["data"]
    assert [model["id"] for model in models] == ["tiny"]


async def test_every_operation_but_the_probes_needs_a_key(
    app: FastAPI, http: httpx.AsyncClient, owned: Ids
) -> None:
    for operation in operations(app):
        status, _ = await operation.ask(http, owned)
        assert (status == 401) == (operation.name not in OPEN), operation
