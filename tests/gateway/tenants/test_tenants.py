from __future__ import annotations

from typing import Any

import httpx
import pytest

from gateway.kit.clock import now_ms


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


async def new_key(operator: httpx.AsyncClient, **wanted: Any) -> dict[str, Any]:
    answer = await operator.post("/v1/admin/keys", json=wanted)
    assert answer.status_code == 201, answer.text
    return answer.json()


async def test_a_tenant_and_its_key(admin: httpx.AsyncClient, http: httpx.AsyncClient) -> None:
    tenant = (await admin.post("/v1/admin/tenants", json={"name": "acme", "weight": 2})).json()
    assert (tenant["name"], tenant["weight"], tenant["suspended_at"]) == ("acme", 2.0, None)
    assert (await admin.get("/v1/admin/tenants/acme")).json() == tenant
    key = await new_key(admin, tenant="acme", name="ci")
    assert key["tenant_id"] == tenant["id"]
    assert (await http.get("/v1/files", headers=bearer(key["secret"]))).status_code == 200
    listed = (await admin.get("/v1/admin/keys", params={"tenant": "acme"})).json()["data"]
    assert [row["id"] for row in listed] == [key["id"]]
    assert "secret" not in listed[0]
    taken = await admin.post("/v1/admin/tenants", json={"name": "acme"})
    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "name_taken")


async def test_revoking_is_immediate(admin: httpx.AsyncClient, http: httpx.AsyncClient, tenant):
    revoked = await admin.delete(f"/v1/admin/keys/{tenant.key_id}")
    assert revoked.json()["revoked_at"] is not None
    assert (await http.get("/v1/files", headers=tenant.headers)).status_code == 401
    again = await admin.delete(f"/v1/admin/keys/{tenant.key_id}")
    assert again.json() == revoked.json()
    rotated = await admin.post(f"/v1/admin/keys/{tenant.key_id}/rotate", json={})
    assert (rotated.status_code, rotated.json()["error"]["code"]) == (409, "key_revoked")


@pytest.mark.parametrize(("overlap", "old_status"), [(0, 401), (3600, 200)])
async def test_rotation_overlaps(
    admin: httpx.AsyncClient, http: httpx.AsyncClient, tenant, overlap: int, old_status: int
) -> None:
    path = f"/v1/admin/keys/{tenant.key_id}/rotate"
    new = (await admin.post(path, json={"overlap_seconds": overlap})).json()
    assert (await http.get("/v1/files", headers=bearer(new["secret"]))).status_code == 200
    assert (await http.get("/v1/files", headers=tenant.headers)).status_code == old_status


async def test_suspension_and_weight(admin: httpx.AsyncClient, client: httpx.AsyncClient, tenant):
    path = f"/v1/admin/tenants/{tenant.tenant_id}"
    assert (await admin.post(path, json={"suspended": True})).json()["suspended_at"]
    refused = await client.get("/v1/files")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "account_suspended")
    changed = (await admin.post(path, json={"suspended": False, "weight": 3})).json()
    assert (changed["suspended_at"], changed["weight"]) == (None, 3.0)
    assert (await client.get("/v1/files")).status_code == 200


async def test_operators_have_keys_too(admin: httpx.AsyncClient, http: httpx.AsyncClient) -> None:
    key = await new_key(admin, admin=True, name="second operator")
    assert (key["tenant_id"], key["scopes"]) == (None, ["admin"])
    headers = bearer(key["secret"])
    assert (await http.get("/v1/admin/tenants", headers=headers)).status_code == 200
    assert (await http.get("/v1/files", headers=headers)).status_code == 403


async def test_keys_expire(admin: httpx.AsyncClient, http: httpx.AsyncClient, tenant) -> None:
    past = now_ms() // 1000 - 1
    key = await new_key(admin, tenant=tenant.tenant_id, expires_at=past)
    assert (await http.get("/v1/files", headers=bearer(key["secret"]))).status_code == 401


@pytest.mark.parametrize(
    ("wanted", "status", "param"),
    [
        ({}, 400, "tenant"),
        ({"tenant": "t", "admin": True}, 400, "tenant"),
        ({"tenant": "nobody"}, 404, "tenant"),
        ({"tenant": "SELF", "scopes": ["admin"]}, 400, "scopes"),
        ({"tenant": "SELF", "scopes": []}, 400, "scopes"),
        ({"tenant": "SELF", "expires_at": 0}, 400, "expires_at"),
    ],
)
async def test_bad_keys(
    admin: httpx.AsyncClient, tenant, wanted: dict[str, Any], status: int, param: str
) -> None:
    if wanted.get("tenant") == "SELF":
        wanted = wanted | {"tenant": tenant.tenant_id}
    answer = await admin.post("/v1/admin/keys", json=wanted)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


async def test_unknown_ids(admin: httpx.AsyncClient) -> None:
    assert (await admin.get("/v1/admin/tenants/nobody")).status_code == 404
    assert (await admin.delete("/v1/admin/keys/nothing")).status_code == 404


async def test_live_workers_are_shown(admin: httpx.AsyncClient, context) -> None:
    from worker.protocol.types import Capacity, WorkerLimits
    from worker.queue.base import WorkerInfo

    info = WorkerInfo("w-1", "tiny", WorkerLimits(64, 1000, 8), Capacity(500, 4, 2))
    await context.queues.directory.announce(info)
    live = (await admin.get("/v1/admin/workers")).json()["data"]
    assert [(each["worker"], each["limits"]["adapter_rank"]) for each in live] == [("w-1", 8)]
    assert live[0]["free"]["kv_tokens"] == 500
