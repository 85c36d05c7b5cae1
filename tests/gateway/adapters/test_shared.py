"""Shared adapters: the operator's, used by the tenants they are granted to and by nobody else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from gateway.adapters.ingest import ingest
from gateway.adapters.service import resolve_model
from gateway.errors import NotFound
from gateway.kit.context import Context
from gateway.kit.tasks import RecordedTasks

pytestmark = pytest.mark.usefixtures("base_model")
Folder = dict[str, bytes]


def form(folder: Folder) -> list[tuple[str, tuple[str, bytes]]]:
    return [("files", (name, content)) for name, content in folder.items()]


@pytest.fixture
async def shared(admin: httpx.AsyncClient, context: Context, make_folder: Callable[..., Folder]):
    """Name of a shared adapter that is ready and granted to nobody."""
    answer = await admin.post(
        "/v1/admin/adapters", data={"name": "house"}, files=form(make_folder())
    )
    assert answer.status_code == 201, answer.text
    await ingest(context, answer.json()["revision"]["id"])
    return "house"


async def grant(admin: httpx.AsyncClient, tenant: Any, name: str = "house") -> httpx.Response:
    return await admin.post(f"/v1/admin/adapters/{name}/grants", json={"tenant": tenant.tenant_id})


async def models(client: httpx.AsyncClient) -> list[str]:
    return [model["id"] for model in (await client.get("/v1/models")).json()["data"]]


async def test_a_granted_adapter_answers_to_its_name(
    admin: httpx.AsyncClient,
    client: httpx.AsyncClient,
    other_client: httpx.AsyncClient,
    context: Context,
    tenant: Any,
    other_tenant: Any,
    shared: str,
) -> None:
    assert await models(client) == ["org/tiny"]
    granted = await grant(admin, tenant)
    assert (granted.status_code, granted.json()["tenant"]) == (201, tenant.tenant_id)
    assert (await grant(admin, tenant)).json()["id"] == granted.json()["id"]
    assert await models(client) == ["org/tiny", "house"]
    assert await models(other_client) == ["org/tiny"]
    shown = (await client.get("/v1/models/house")).json()
    assert (shown["owned_by"], shown["kind"]) == ("batten", "adapter")
    assert (await client.get("/v1/models/house@1")).status_code == 200
    theirs = await other_client.get("/v1/models/house")
    nobodys = await other_client.get("/v1/models/horse")
    assert theirs.status_code == nobodys.status_code == 404
    assert theirs.text == nobodys.text.replace("horse", "house")
    async with context.database.read() as session:
        assert (await resolve_model(session, tenant.scope, "house")).price_names[0] == "house"
        with pytest.raises(NotFound):
            await resolve_model(session, other_tenant.scope, "house")
    listed = (await admin.get("/v1/admin/adapters/house/grants")).json()["data"]
    assert [each["tenant"] for each in listed] == [tenant.tenant_id]


async def test_a_tenant_cannot_change_what_is_shared(
    admin: httpx.AsyncClient, client: httpx.AsyncClient, tenant: Any, shared: str
) -> None:
    await grant(admin, tenant)
    adapter = (await admin.get("/v1/admin/adapters/house")).json()
    for name in ("house", adapter["id"]):
        answers = [
            await client.delete(f"/v1/adapters/{name}"),
            await client.get(f"/v1/adapters/{name}"),
            await client.get(f"/v1/adapters/{name}/revisions"),
            await client.post(f"/v1/adapters/{name}/promote", json={"revision": 1}),
            await client.post(f"/v1/adapters/{name}/rollback"),
        ]
        assert {answer.status_code for answer in answers} == {404}
    assert (await client.get("/v1/adapters")).json()["data"] == []
    for method, path in [("GET", ""), ("DELETE", "/house"), ("POST", "/house/grants")]:
        answer = await client.request(method, f"/v1/admin/adapters{path}", json={"tenant": "x"})
        assert answer.status_code == 403
    assert await models(client) == ["org/tiny", "house"]


async def test_a_name_means_one_adapter_to_a_tenant(
    admin: httpx.AsyncClient,
    client: httpx.AsyncClient,
    context: Context,
    tenant: Any,
    other_tenant: Any,
    shared: str,
    make_folder: Callable[..., Folder],
) -> None:
    mine = await client.post("/v1/adapters", data={"name": "house"}, files=form(make_folder()))
    assert mine.status_code == 201
    taken = await grant(admin, tenant)
    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "name_taken")
    assert (await client.delete("/v1/adapters/house")).status_code == 200
    assert (await grant(admin, tenant)).status_code == 201
    clash = await client.post("/v1/adapters", data={"name": "house"}, files=form(make_folder()))
    assert (clash.status_code, clash.json()["error"]["code"]) == (409, "name_taken")
    base = await admin.post(
        "/v1/admin/adapters", data={"name": "org/tiny"}, files=form(make_folder())
    )
    assert (base.status_code, base.json()["error"]["code"]) == (409, "name_taken")


async def test_revisions_are_the_operators(
    admin: httpx.AsyncClient,
    client: httpx.AsyncClient,
    context: Context,
    tenant: Any,
    shared: str,
    make_folder: Callable[..., Folder],
) -> None:
    await grant(admin, tenant)
    second = await admin.post(
        "/v1/admin/adapters", data={"name": "house"}, files=form(make_folder(seed=1))
    )
    await ingest(context, second.json()["revision"]["id"])
    assert (await client.get("/v1/models/house")).json()["revision"] == 1
    promoted = await admin.post("/v1/admin/adapters/house/promote", json={"revision": 2})
    assert promoted.status_code == 200
    assert (await client.get("/v1/models/house")).json()["revision"] == 2
    await admin.post("/v1/admin/adapters/house/rollback")
    assert (await client.get("/v1/models/house")).json()["revision"] == 1
    listed = (await admin.get("/v1/admin/adapters/house/revisions")).json()["data"]
    assert [row["number"] for row in listed] == [2, 1]


async def test_revoking_and_deleting_end_access(
    admin: httpx.AsyncClient,
    client: httpx.AsyncClient,
    other_client: httpx.AsyncClient,
    tasks: RecordedTasks,
    tenant: Any,
    other_tenant: Any,
    shared: str,
) -> None:
    await grant(admin, tenant)
    await grant(admin, other_tenant)
    path = f"/v1/admin/adapters/house/grants/{tenant.tenant_id}"
    assert (await admin.delete(path)).json()["deleted"] is True
    assert tasks.sent[-1][0] == "adapters.withdraw"
    again = await admin.delete(path)
    assert (again.status_code, again.json()["error"]["code"]) == (404, "grant_not_found")
    assert await models(client) == ["org/tiny"]
    assert await models(other_client) == ["org/tiny", "house"]
    assert (await admin.delete("/v1/admin/adapters/house")).json()["deleted"] is True
    assert await models(other_client) == ["org/tiny"]
    assert (await admin.get("/v1/admin/adapters")).json()["data"] == []


async def test_unknown_tenants_and_adapters(admin: httpx.AsyncClient, shared: str) -> None:
    for name, tenant in (("house", "nobody"), ("nothing", "nobody")):
        answer = await admin.post(f"/v1/admin/adapters/{name}/grants", json={"tenant": tenant})
        assert answer.status_code == 404
        assert (await admin.delete(f"/v1/admin/adapters/{name}/grants/x")).status_code == 404
