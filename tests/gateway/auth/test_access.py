"""Who may do what, and what refusals look like."""

from __future__ import annotations

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from gateway.auth.keys import generate_key, hash_key
from gateway.auth.principal import Principal, resource_of
from gateway.kit.clock import now_ms
from gateway.kit.database import Database
from gateway.models import ApiKey, Tenant


async def test_openai_client_raises_its_authentication_error(openai_client: AsyncOpenAI) -> None:
    stranger = openai_client.with_options(api_key="bt_nobody-knows-this-key-0000")
    with pytest.raises(openai.AuthenticationError) as refused:
        await stranger.files.list()
    assert refused.value.code == "invalid_api_key"
    assert "nobody-knows" not in refused.value.message


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic eDp5", "Bearer bt_" + "x" * 43, "bt_x"]
)
async def test_missing_and_wrong_keys(http: httpx.AsyncClient, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    answer = await http.get("/v1/files", headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("change", ["revoked", "expired", "suspended"])
async def test_keys_that_no_longer_work(
    client: httpx.AsyncClient, database: Database, tenant, change: str
) -> None:
    assert (await client.get("/v1/files")).status_code == 200
    async with database.write() as session:
        key = await session.get_one(ApiKey, tenant.key_id)
        owner = await session.get_one(Tenant, tenant.tenant_id)
        if change == "revoked":
            key.revoked_at = now_ms()
        elif change == "expired":
            key.expires_at = now_ms()
        else:
            owner.suspended_at = now_ms()
    answer = await client.get("/v1/files")
    assert answer.status_code == (403 if change == "suspended" else 401)


@pytest.mark.parametrize(
    ("scopes", "status"),
    [
        (["all"], {"GET": 200, "DELETE": 404}),
        (["read"], {"GET": 200, "DELETE": 403}),
        (["files:read"], {"GET": 200, "DELETE": 403}),
        (["files:write"], {"GET": 200, "DELETE": 404}),
        (["batches:write"], {"GET": 403, "DELETE": 403}),
    ],
)
async def test_scopes_limit_a_key(
    http: httpx.AsyncClient, make_tenant, scopes: list[str], status: dict[str, int]
) -> None:
    account = await make_tenant(scopes=scopes)
    listed = await http.get("/v1/files", headers=account.headers)
    deleted = await http.delete("/v1/files/file_0", headers=account.headers)
    assert {"GET": listed.status_code, "DELETE": deleted.status_code} == status


async def test_admin_and_tenant_keys_do_not_mix(
    admin: httpx.AsyncClient, client: httpx.AsyncClient
) -> None:
    assert (await admin.get("/v1/admin/tenants")).status_code == 200
    assert (await admin.get("/v1/files")).status_code == 403
    for path in ("tenants", "keys", "prices", "workers"):
        answer = await client.get(f"/v1/admin/{path}")
        assert answer.status_code == 403, path
        assert answer.json()["error"]["type"] == "permission_error"


async def test_only_a_hash_is_kept(database: Database, tenant) -> None:
    async with database.read() as session:
        key = await session.get_one(ApiKey, tenant.key_id)
    assert key.hash == hash_key(tenant.secret)
    stored = " ".join(str(value) for value in vars(key).values())
    assert tenant.secret not in stored
    assert tenant.secret[10:30] not in stored


def test_keys_are_long_and_their_text_is_not_shown() -> None:
    first, second = generate_key(), generate_key()
    assert first.secret != second.secret
    assert first.secret.startswith("bt_")
    assert len(first.secret) == 46
    assert first.secret not in repr(first)


@pytest.mark.parametrize(
    ("path", "resource"),
    [
        ("/v1/files/f/content", "files"),
        ("/v1/chat/completions", "inference"),
        ("/v1/completions", "inference"),
        ("/v1/batches", "batches"),
    ],
)
def test_a_path_names_its_resource(path: str, resource: str) -> None:
    assert resource_of(path) == resource
    writer = Principal("t", "k", frozenset({f"{resource}:write"}))
    assert writer.may("write", resource)
    assert writer.may("read", resource)
    assert not writer.may("read", "usage")
