"""Files, by the official client and by hand."""

from __future__ import annotations

import io
import tracemalloc
from collections.abc import AsyncIterator

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from gateway.files import service
from gateway.kit.context import Context

LINES = b'{"custom_id":"1"}\n{"custom_id":"2"}\n'


async def upload(client: AsyncOpenAI, content: bytes = LINES, name: str = "in.jsonl") -> str:
    file = await client.files.create(file=(name, io.BytesIO(content)), purpose="batch")
    return file.id


async def stored_keys(context: Context) -> list[str]:
    return [item["path"] async for page in context.store.list() for item in page]


async def test_upload_and_read_back(openai_client: AsyncOpenAI) -> None:
    file = await openai_client.files.create(file=("in.jsonl", io.BytesIO(LINES)), purpose="batch")
    assert (file.object, file.bytes, file.filename) == ("file", len(LINES), "in.jsonl")
    assert (file.purpose, file.status) == ("batch", "processed")
    assert file.expires_at == file.created_at + 30 * 86400
    assert await openai_client.files.retrieve(file.id) == file
    content = await openai_client.files.content(file.id)
    assert content.read() == LINES


async def test_an_expiry_can_be_asked_for(openai_client: AsyncOpenAI) -> None:
    file = await openai_client.files.create(
        file=("in.jsonl", LINES),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert file.expires_at is not None
    assert file.expires_at - file.created_at in (3600, 3601)


async def test_the_list_pages_by_id(openai_client: AsyncOpenAI) -> None:
    ids = [await upload(openai_client) for _ in range(5)]
    listed = [file.id async for file in await openai_client.files.list(limit=2)]
    assert listed == ids[::-1]
    ascending = await openai_client.files.list(limit=3, order="asc")
    assert [file.id for file in ascending.data] == ids[:3]
    assert ascending.has_more
    assert (await openai_client.files.list(purpose="batch_output")).data == []


async def test_paging_survives_deletion_of_the_last_seen_file(openai_client: AsyncOpenAI) -> None:
    ids = [await upload(openai_client) for _ in range(3)]
    await openai_client.files.delete(ids[1])
    page = await openai_client.files.list(order="asc", after=ids[1])
    assert [file.id for file in page.data] == [ids[2]]


async def test_a_deleted_file_is_an_unknown_file(
    openai_client: AsyncOpenAI, client: httpx.AsyncClient
) -> None:
    file_id = await upload(openai_client)
    deleted = await openai_client.files.delete(file_id)
    assert (deleted.id, deleted.deleted, deleted.object) == (file_id, True, "file")
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        answer = await client.request(method, f"/v1/files/{file_id}{path}")
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == f"No such File object: {file_id}"


async def test_another_tenants_file_is_an_unknown_file(
    openai_client: AsyncOpenAI, other_client: httpx.AsyncClient
) -> None:
    file_id = await upload(openai_client)
    unknown = "file_00000000000000000000000000"
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        theirs = await other_client.request(method, f"/v1/files/{file_id}{path}")
        nobodys = await other_client.request(method, f"/v1/files/{unknown}{path}")
        assert theirs.status_code == nobodys.status_code == 404
        assert theirs.text == nobodys.text.replace(unknown, file_id)
    after = await other_client.get("/v1/files", params={"after": file_id})
    assert (after.status_code, after.json()["error"]["param"]) == (400, "after")
    assert (await other_client.get("/v1/files")).json()["data"] == []
    assert (await openai_client.files.retrieve(file_id)).id == file_id


@pytest.mark.parametrize(
    ("header", "status", "body"),
    [
        ("bytes=0-3", 206, LINES[:4]),
        ("bytes=5-", 206, LINES[5:]),
        ("bytes=-4", 206, LINES[-4:]),
        ("bytes=0-9999", 206, LINES),
        ("bytes=9999-", 416, b""),
        ("bytes=-0", 416, b""),
        ("bytes=3-1", 200, LINES),
        ("lines=1-2", 200, LINES),
    ],
)
async def test_ranges(
    openai_client: AsyncOpenAI, client: httpx.AsyncClient, header: str, status: int, body: bytes
) -> None:
    file_id = await upload(openai_client)
    answer = await client.get(f"/v1/files/{file_id}/content", headers={"Range": header})
    assert (answer.status_code, answer.content) == (status, body)
    if status != 416:
        assert answer.headers["content-length"] == str(len(body))


@pytest.mark.parametrize(
    ("files", "data", "message", "param"),
    [
        (
            {"file": ("a.json", LINES)},
            {"purpose": "batch"},
            "Invalid file format for Batch API. Must be .jsonl",
            "file",
        ),
        ({"file": ("a.jsonl", b"")}, {"purpose": "batch"}, "The file is empty.", "file"),
        ({"file": ("a.jsonl", LINES)}, {}, "Missing required parameter: 'purpose'.", "purpose"),
        ({"other": (None, b"x")}, {"purpose": "batch"}, "Missing required", "file"),
        ({"file": ("a.jsonl", LINES)}, {"purpose": "vision"}, "Invalid value for", "purpose"),
        (
            {"file": ("a.jsonl", LINES)},
            {"purpose": "batch", "expires_after[anchor]": "now"},
            "Invalid value",
            "expires_after.anchor",
        ),
        (
            {"file": ("a.jsonl", LINES)},
            {
                "purpose": "batch",
                "expires_after[anchor]": "created_at",
                "expires_after[seconds]": "7",
            },
            "Invalid value",
            "expires_after.seconds",
        ),
    ],
)
async def test_bad_forms_leave_nothing(
    client: httpx.AsyncClient,
    context: Context,
    files: dict[str, object],
    data: dict[str, str],
    message: str,
    param: str,
) -> None:
    answer = await client.post("/v1/files", files=files, data=data)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith(message)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert await stored_keys(context) == []


@pytest.mark.parametrize(
    ("media", "body", "status"),
    [
        ("application/json", b"{}", 415),
        ("multipart/form-data", b"x", 400),
        ("multipart/form-data; boundary=b", b"junk", 400),
        ("multipart/form-data; boundary=b", b"", 400),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{}',
            400,
        ),
    ],
)
async def test_malformed_bodies(
    client: httpx.AsyncClient, context: Context, media: str, body: bytes, status: int
) -> None:
    answer = await client.post("/v1/files", content=body, headers={"Content-Type": media})
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert await stored_keys(context) == []


async def test_fields_may_come_in_any_order(client: httpx.AsyncClient) -> None:
    file = '--b\r\nContent-Disposition: form-data; name="file"; filename="ü.jsonl"\r\n\r\n{}\r\n'
    purpose = '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    for body in (file + purpose, purpose + file):
        answer = await client.post(
            "/v1/files",
            content=f"{body}--b--\r\n".encode(),
            headers={"Content-Type": "multipart/form-data; boundary=b"},
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["filename"] == "ü.jsonl"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_large_file_is_never_held_in_memory(
    client: httpx.AsyncClient, context: Context
) -> None:
    size, chunk = 64 * 2**20, b"x" * 2**16
    head = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    )

    async def body() -> AsyncIterator[bytes]:
        yield head
        for _ in range(size // len(chunk)):
            yield chunk
        yield b"\r\n--b--\r\n"

    tracemalloc.start()
    try:
        answer = await client.post(
            "/v1/files",
            content=body(),
            headers={"Content-Type": "multipart/form-data; boundary=b"},
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert answer.json()["bytes"] == size
    assert peak < 8 * 2**20


async def test_a_file_beyond_the_limit_is_refused(
    client: httpx.AsyncClient, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(context.settings.__dict__, "file_bytes", 10)
    answer = await client.post(
        "/v1/files", files={"file": ("a.jsonl", LINES)}, data={"purpose": "batch"}
    )
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "file_too_large"
    assert await stored_keys(context) == []


async def test_an_idempotency_key_uploads_once(
    openai_client: AsyncOpenAI, context: Context
) -> None:
    create = openai_client.files.create
    key = {"Idempotency-Key": "k1"}
    first = await create(file=("a.jsonl", LINES), purpose="batch", extra_headers=key)
    again = await create(file=("a.jsonl", LINES), purpose="batch", extra_headers=key)
    assert first == again
    assert len(await stored_keys(context)) == 1
    with pytest.raises(openai.ConflictError) as conflict:
        await create(file=("a.jsonl", LINES + b"{}"), purpose="batch", extra_headers=key)
    assert conflict.value.code == "idempotency_conflict"
    with pytest.raises(openai.ConflictError):
        await create(
            file=("a.jsonl", LINES),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3600},
            extra_headers=key,
        )
    assert len(await stored_keys(context)) == 1


async def test_outputs_and_ranges_for_other_domains(
    tenant, context: Context, openai_client: AsyncOpenAI
) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"abc"
        yield b"def"

    file = await service.create_output(context, tenant.scope, "out.jsonl", "batch_output", chunks())
    async with context.database.write() as session:
        session.add(file)
    assert b"".join([chunk async for chunk in service.stream(context, file)]) == b"abcdef"
    listed = await openai_client.files.list(purpose="batch_output")
    assert [found.id for found in listed.data] == [file.id]
    content = (await openai_client.files.content(file.id)).read()
    assert content == b"abcdef"
