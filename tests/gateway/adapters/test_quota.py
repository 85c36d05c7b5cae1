"""How many adapters a tenant may keep, and how large, also for uploads at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.usefixtures("base_model")
Folder = dict[str, bytes]


async def send(client: httpx.AsyncClient, folder: Folder, name: str) -> httpx.Response:
    files = [("files", (file, content)) for file, content in folder.items()]
    return await client.post("/v1/adapters", data={"name": name}, files=files)


async def limit(admin: httpx.AsyncClient, tenant: Any, **limits: int) -> None:
    answer = await admin.post("/v1/admin/limits", json={"tenant": tenant.tenant_id, **limits})
    assert answer.status_code == 200, answer.text


async def test_adapters_are_counted(
    admin: httpx.AsyncClient,
    client: httpx.AsyncClient,
    other_client: httpx.AsyncClient,
    tenant: Any,
    make_folder: Callable[..., Folder],
) -> None:
    await limit(admin, tenant, adapters=2)
    answers = await asyncio.gather(*(send(client, make_folder(), f"a{n}") for n in range(4)))
    assert sorted(answer.status_code for answer in answers) == [201, 201, 429, 429]
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.json()["error"]["code"] == "adapters_exceeded"
    kept = next(answer.json()["name"] for answer in answers if answer.status_code == 201)
    assert (await send(client, make_folder(), kept)).status_code == 201  # a revision
    assert (await send(other_client, make_folder(), "a9")).status_code == 201
    await client.delete(f"/v1/adapters/{kept}")
    assert (await send(client, make_folder(), "new")).status_code == 201


async def test_bytes_are_counted_over_all_revisions(
    admin: httpx.AsyncClient,
    client: httpx.AsyncClient,
    tenant: Any,
    make_folder: Callable[..., Folder],
) -> None:
    folder = make_folder()
    size = sum(map(len, folder.values()))
    await limit(admin, tenant, adapter_bytes=2 * size)
    assert (await send(client, folder, "a")).status_code == 201
    assert (await send(client, folder, "a")).status_code == 201
    refused = await send(client, folder, "a")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "adapter_bytes_exceeded")
    revisions = (await client.get("/v1/adapters/a/revisions")).json()["data"]
    assert len(revisions) == 2
