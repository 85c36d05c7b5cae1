"""The gateway's files and adapters in an S3-compatible store."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from obstore.exceptions import GenericError
from openai import AsyncOpenAI

from gateway.adapters.ingest import ingest
from gateway.adapters.purge import purge_contents
from gateway.files.purge import purge_files
from gateway.kit import store as kit_store
from gateway.kit.context import Context
from gateway.kit.store import delete_blob, read_blob, write_blob
from gateway.settings import Settings
from tests.gateway.adapters.conftest import base_model, make_folder
from tests.s3 import S3Server
from worker.adapters.store import AdapterStore
from worker.protocol.object_store import open_store

__all__ = ["base_model", "make_folder"]
pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
_buckets = itertools.count()


@pytest.fixture
def server(s3_server: S3Server) -> S3Server:
    return s3_server


@pytest.fixture
def settings(
    tmp_path: Path,
    database_url: str,
    redis_url: str,
    server: S3Server,
    monkeypatch: pytest.MonkeyPatch,
) -> Settings:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    bucket = server.make_bucket(f"gateway-{next(_buckets)}")
    return Settings(
        data=tmp_path,
        database_url=database_url,
        redis_url=redis_url,
        store=f"{bucket}/batten",
        store_seconds=2,
        admin_key="admin",
    )


async def pieces(count: int, size: int) -> AsyncIterator[bytes]:
    for number in range(count):
        yield bytes([number]) * size


async def keys(context: Context) -> list[str]:
    return sorted([item["path"] async for page in context.store.list() for item in page])


async def test_blobs_are_written_read_and_deleted(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kit_store, "READ_CHUNK", 1_000_000)
    written = await write_blob(context.store, "files/a", pieces(7, 1_500_000))
    assert written.bytes == 10_500_000
    whole = [chunk async for chunk in read_blob(context.store, "files/a")]
    assert len(whole) == 11
    assert b"".join(whole) == b"".join([bytes([n]) * 1_500_000 for n in range(7)])
    part = [chunk async for chunk in read_blob(context.store, "files/a", 1_499_999, 1_500_001)]
    assert b"".join(part) == b"\x00\x01"
    assert [chunk async for chunk in read_blob(context.store, "files/a", 5, 5)] == []
    for _ in range(2):
        await delete_blob(context.store, "files/a")
    with pytest.raises(FileNotFoundError):
        _ = [chunk async for chunk in read_blob(context.store, "files/a")]


async def test_half_a_blob_is_none(context: Context) -> None:
    async def broken() -> AsyncIterator[bytes]:
        async for piece in pieces(3, 6_000_000):
            yield piece
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await write_blob(context.store, "files/half", broken())
    with pytest.raises(kit_store.BlobTooLarge):
        await write_blob(context.store, "files/half", pieces(3, 6_000_000), limit=7_000_000)
    assert await keys(context) == []


async def test_a_batch_runs_over_s3(
    openai_client: AsyncOpenAI, client: httpx.AsyncClient, deployment: Any
) -> None:
    line = {"method": "POST", "url": "/v1/completions"}
    line["body"] = {"model": "tiny", "prompt": "Hi", "max_tokens": 4}  # type: ignore[assignment]
    lines = [json.dumps({"custom_id": str(n), **line}) for n in range(5)]
    content = "\n".join(lines).encode()
    file = await openai_client.files.create(file=("in.jsonl", content), purpose="batch")
    part = await client.get(f"/v1/files/{file.id}/content", headers={"Range": "bytes=2-9"})
    assert (part.status_code, part.content) == (206, content[2:10])
    batch = await openai_client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    await deployment.finish_all()
    batch = await openai_client.batches.retrieve(batch.id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 5)
    output = await openai_client.files.content(batch.output_file_id or "")
    assert len(output.text.splitlines()) == 5
    for each in (file.id, batch.output_file_id or ""):
        await openai_client.files.delete(each)
    await purge_files(deployment.context)
    assert not [key for key in await keys(deployment.context) if key.startswith("files/")]


async def test_an_uploaded_adapter_reaches_a_worker(
    client: httpx.AsyncClient,
    context: Context,
    base_model: str,
    make_folder: Callable[..., dict[str, bytes]],
    settings: Settings,
    tmp_path: Path,
) -> None:
    folder = make_folder()
    files = [("files", (name, content)) for name, content in folder.items()]
    answer = await client.post("/v1/adapters", data={"name": "bot"}, files=files)
    revision_id = answer.json()["revision"]["id"]
    assert all(key.startswith(f"uploads/{revision_id}/") for key in await keys(context))
    await ingest(context, revision_id)
    revision = (await client.get("/v1/adapters/bot/revisions/1")).json()
    assert revision["status"] == "ready", revision["errors"]
    assert all(key.startswith(f"adapters/{revision['digest']}/") for key in await keys(context))
    worker = AdapterStore(open_store(settings.effective_store), tmp_path / "cache")
    fetched = worker.fetch(revision["digest"])
    assert {file.name: file.read_bytes() for file in fetched.iterdir()} == folder
    await client.delete("/v1/adapters/bot")
    assert await purge_contents(context, timedelta(seconds=-1)) == 1
    assert await keys(context) == []


class TestOutage:
    @pytest.fixture
    def server(self):
        server = S3Server()
        server.start()
        yield server
        server.close()

    async def test_a_store_that_is_away_is_a_503_and_spoils_nothing(
        self, client: httpx.AsyncClient, deployment: Any, server: S3Server
    ) -> None:
        form = {"files": {"file": ("in.jsonl", b"{}")}, "data": {"purpose": "batch"}}
        file = (await client.post("/v1/files", **form)).json()  # type: ignore[arg-type]
        server.stop()
        for answer in (
            await client.post("/v1/files", **form),  # type: ignore[arg-type]
            await client.get(f"/v1/files/{file['id']}/content"),
        ):
            assert answer.status_code == 503, answer.text
            assert answer.headers["retry-after"]
            assert server.endpoint not in answer.text
        job = {"endpoint": "/v1/completions", "body": {"model": "tiny", "prompt": "Hi"}}
        assert (await client.post("/v1/jobs", json=job)).status_code == 202
        assert len((await client.get("/v1/files")).json()["data"]) == 1

    async def test_a_store_that_is_away_ends_a_sweep(
        self, client: httpx.AsyncClient, context: Context, server: S3Server
    ) -> None:
        form = {"files": {"file": ("in.jsonl", b"{}")}, "data": {"purpose": "batch"}}
        file = (await client.post("/v1/files", **form)).json()  # type: ignore[arg-type]
        await client.delete(f"/v1/files/{file['id']}")
        server.stop()
        with pytest.raises(GenericError):
            await purge_files(context)
