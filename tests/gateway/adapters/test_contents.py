"""Files of deleted adapters leave the store; whatever is still needed, or comes back, stays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import httpx
import obstore
import pytest
from obstore.exceptions import PermissionDeniedError
from sqlalchemy import select, update

from gateway.adapters import purge
from gateway.adapters.ingest import ingest, waiting_revisions
from gateway.adapters.purge import content_keys, purge_contents
from gateway.control.app import clean_store
from gateway.kit.clock import now_ms
from gateway.kit.context import Context
from gateway.kit.store import sweep_blob
from gateway.models import Adapter, AdapterContent, AdapterRevision
from tests.gateway.adapters.test_adapters import Folder, add, send, stored_keys

NOW = timedelta(seconds=-1)
MakeFolder = Callable[..., Folder]

pytestmark = pytest.mark.usefixtures("base_model")


async def remove(client: httpx.AsyncClient, name: str = "bot") -> None:
    assert (await client.delete(f"/v1/adapters/{name}")).status_code == 200


async def contents(context: Context) -> list[str]:
    async with context.database.read() as session:
        return list(await session.scalars(select(AdapterContent.digest)))


async def test_files_of_a_deleted_adapter_go_after_a_while(
    client: httpx.AsyncClient, context: Context, make_folder: MakeFolder
) -> None:
    await add(client, context, make_folder(seed=1))
    kept = await add(client, context, make_folder(seed=2), "kept")
    await remove(client)
    assert await purge_contents(context, timedelta(hours=1)) == 0
    assert await purge_contents(context, NOW) == 1
    assert await stored_keys(context) == content_keys(kept["digest"])
    assert await contents(context) == [kept["digest"]]
    assert await purge_contents(context, NOW) == 0


async def test_every_revision_keeps_its_files_while_the_adapter_lives(
    client: httpx.AsyncClient, context: Context, make_folder: MakeFolder
) -> None:
    for seed in (1, 2):
        await add(client, context, make_folder(seed=seed))
    assert await purge_contents(context, NOW) == 0
    await remove(client)
    assert await purge_contents(context, NOW) == 2
    assert await stored_keys(context) == []


async def test_tenants_who_have_the_same_content_keep_it(
    client: httpx.AsyncClient,
    other_client: httpx.AsyncClient,
    context: Context,
    make_folder: MakeFolder,
) -> None:
    mine = await add(client, context, make_folder())
    theirs = await add(other_client, context, make_folder(), "theirs")
    assert mine["digest"] == theirs["digest"]
    await remove(client)
    assert await purge_contents(context, NOW) == 0
    assert await stored_keys(context) == content_keys(mine["digest"])
    await remove(other_client, "theirs")
    assert await purge_contents(context, NOW) == 1
    assert await stored_keys(context) == []


async def test_a_request_on_a_worker_keeps_its_adapter(
    client: httpx.AsyncClient, tenant: Any, deployment: Any
) -> None:
    context, digest = deployment.context, "d" * 64
    async with context.database.write() as session:
        session.add(AdapterContent(digest=digest, created_at=now_ms()))
        adapter = Adapter(
            id="adapter_bot",
            tenant_id=tenant.tenant_id,
            name="bot",
            base_model="tiny",
            promoted_revision_id="adrev_bot",
            created_at=now_ms(),
        )
        session.add(adapter)
        await session.flush()
        session.add(
            AdapterRevision(
                id="adrev_bot",
                adapter_id=adapter.id,
                tenant_id=tenant.tenant_id,
                number=1,
                status="ready",
                digest=digest,
                rank=1,
                bytes=1,
                upload_key="uploads/none",
                created_at=now_ms(),
            )
        )
    body = {"model": "bot", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
    sent = {"endpoint": "/v1/chat/completions", "body": body}
    job = (await client.post("/v1/jobs", json=sent)).json()["id"]
    [lease] = await deployment.claim()
    await remove(client)
    await deployment.control()
    assert await purge_contents(context, NOW) == 0, "it was dispatched"
    await deployment.started(lease)
    assert await purge_contents(context, NOW) == 0, "it runs"
    assert await deployment.answer(lease)
    await deployment.collect()
    assert (await client.get(f"/v1/jobs/{job}")).json()["status"] == "completed"
    assert await purge_contents(context, NOW) == 1


async def test_an_upload_of_what_was_purged_is_stored_again(
    client: httpx.AsyncClient, context: Context, make_folder: MakeFolder
) -> None:
    first = await add(client, context, make_folder())
    await remove(client)
    assert await purge_contents(context, NOW) == 1
    again = await add(client, context, make_folder())
    assert (again["status"], again["digest"]) == ("ready", first["digest"])
    assert await purge_contents(context, NOW) == 0
    assert await stored_keys(context) == content_keys(again["digest"])


async def pass_since_the_mark(context: Context, time: timedelta) -> None:
    async with context.database.write() as session:
        for content in await session.scalars(select(AdapterContent)):
            assert content.purging_at is not None
            content.purging_at -= int(time.total_seconds() * 1000)


async def test_the_sweep_keeps_files_as_long_as_the_settings_say(
    client: httpx.AsyncClient, context: Context, make_folder: MakeFolder
) -> None:
    await add(client, context, make_folder())
    await remove(client)
    await clean_store(context)
    assert len(await contents(context)) == 1
    settings = context.settings.model_copy(update={"deleted_adapter_hours": 0})
    await clean_store(replace(context, settings=settings))
    assert await contents(context) == []


async def test_an_upload_waits_until_old_files_of_its_content_are_gone(
    client: httpx.AsyncClient,
    context: Context,
    make_folder: MakeFolder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sweep stands between its mark and the store, or dies there."""
    first = await add(client, context, make_folder())
    await remove(client)

    async def killed(store: Any, key: str) -> None:
        raise asyncio.CancelledError

    with monkeypatch.context() as patch:
        patch.setattr(purge, "sweep_blob", killed)
        with pytest.raises(asyncio.CancelledError):
            await purge_contents(context, NOW)
    second = (await send(client, make_folder())).json()["revision"]["id"]
    await ingest(context, second)
    assert await waiting_revisions(context) == [second]
    assert await purge_contents(context, NOW) == 0, "another sweep may still be at it"
    await pass_since_the_mark(context, timedelta(minutes=9))
    assert await purge_contents(context, NOW) == 0
    await pass_since_the_mark(context, timedelta(minutes=1))
    assert await purge_contents(context, NOW) == 1
    assert await contents(context) == []
    await ingest(context, second)
    assert await waiting_revisions(context) == []
    assert await contents(context) == [first["digest"]]
    revision = (await client.get("/v1/adapters/bot/revisions/1")).json()
    assert (revision["status"], revision["digest"]) == ("ready", first["digest"])
    assert [key for key in await stored_keys(context) if key.startswith("adapters/")] == (
        content_keys(first["digest"])
    )


async def test_an_upload_that_is_being_stored_keeps_its_content(
    client: httpx.AsyncClient,
    context: Context,
    make_folder: MakeFolder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sweep runs between the claim and each file, and between the last file and the commit."""
    first = await add(client, context, make_folder())
    await remove(client)
    put, swept = obstore.put_async, []

    async def put_and_sweep(store: Any, key: str, content: Any) -> None:
        swept.append(await purge_contents(context, NOW))
        await put(store, key, content)
        swept.append(await purge_contents(context, NOW))

    revision_id = (await send(client, make_folder())).json()["revision"]["id"]
    monkeypatch.setattr("gateway.adapters.ingest.obstore.put_async", put_and_sweep)
    await ingest(context, revision_id)
    assert swept == [0, 0, 0, 0]
    assert await stored_keys(context) == content_keys(first["digest"])


async def test_sweeps_and_uploads_at_once_lose_nothing(
    client: httpx.AsyncClient,
    context: Context,
    make_folder: MakeFolder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two sweeps and the upload of the content that both want to remove, over and over."""

    async def slowly(store: Any, key: str) -> bool:
        await asyncio.sleep(0)
        return await sweep_blob(store, key)

    monkeypatch.setattr(purge, "sweep_blob", slowly)
    for _ in range(15):
        revision_id = (await send(client, make_folder())).json()["revision"]["id"]
        await asyncio.gather(
            purge_contents(context, NOW), ingest(context, revision_id), purge_contents(context, NOW)
        )
        await ingest(context, revision_id)
        revision = (await client.get("/v1/adapters/bot/revisions/1")).json()
        assert revision["status"] == "ready"
        assert await stored_keys(context) == content_keys(revision["digest"])
        await remove(client)


async def test_what_the_store_refuses_to_delete_holds_up_nothing_else(
    client: httpx.AsyncClient,
    context: Context,
    make_folder: MakeFolder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And its content may be uploaded again."""
    revisions = [await add(client, context, make_folder(seed=seed)) for seed in (1, 2, 3)]
    digests = sorted(each["digest"] for each in revisions)
    await remove(client)
    kept = content_keys(digests[0])[1]
    really = obstore.delete_async

    async def refused(store: Any, key: str) -> None:
        if key == kept:
            raise PermissionDeniedError(f"{key} is locked")
        await really(store, key)

    with monkeypatch.context() as patch:
        patch.setattr(obstore, "delete_async", refused)
        patch.setattr(purge, "_AT_ONCE", 1)
        patch.setattr(purge, "SWEEP_SECONDS", 0)
        assert await purge_contents(context, NOW) == 0
        patch.setattr(purge, "SWEEP_SECONDS", 60)
        assert [await purge_contents(context, NOW) for _ in range(3)] == [1, 1, 0]
        assert await stored_keys(context) == [kept]
        assert await contents(context) == [digests[0]]
        seed = [each["digest"] for each in revisions].index(digests[0]) + 1
        again = await add(client, context, make_folder(seed=seed), "again")
        assert (again["status"], again["digest"]) == ("ready", digests[0])
        assert await stored_keys(context) == content_keys(digests[0])
    await remove(client, "again")
    assert await purge_contents(context, NOW) == 1
    assert await stored_keys(context) == []


async def test_a_rejected_upload_has_no_content(
    client: httpx.AsyncClient, context: Context, make_folder: MakeFolder
) -> None:
    revision_id = (await send(client, make_folder())).json()["revision"]["id"]
    async with context.database.write() as session:
        session.add(AdapterContent(digest="e" * 64, created_at=now_ms()))
        await session.execute(update(AdapterRevision).values(digest="e" * 64))
    assert await purge_contents(context, NOW) == 0, "it is being stored"
    broken = make_folder(module="k_proj")
    for name, data in broken.items():
        await context.store.put_async(f"uploads/{revision_id}/{name}", data)
    await ingest(context, revision_id)
    revision = (await client.get("/v1/adapters/bot/revisions/1")).json()
    assert (revision["status"], revision["digest"]) == ("rejected", None)
    assert await purge_contents(context, NOW) == 1
