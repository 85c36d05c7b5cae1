"""Retrying what failed, and estimates."""

from __future__ import annotations

import json
from typing import Any

import httpx
import obstore
import pytest
from sqlalchemy import func, select

from gateway.batches import retry
from gateway.models import Batch, File, Request

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
WANTED = {"endpoint": CHAT, "completion_window": "24h"}


def requests(count: int) -> list[dict[str, Any]]:
    return [{"custom_id": f"r-{number}", "body": BODY} for number in range(count)]


async def create(client: httpx.AsyncClient, **wanted: Any) -> dict[str, Any]:
    answer = await client.post("/v1/batches", json={**WANTED, **wanted})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def partly_failed(client: httpx.AsyncClient, deployment: Any, count: int = 4) -> Any:
    """The first two lines fail."""
    batch = await create(client, requests=requests(count), metadata={"team": "a"})
    await deployment.control()
    await deployment.dispatch()
    for number, lease in enumerate(await deployment.claim()):
        if number < 2:
            await deployment.fail(lease, "engine_error")
        else:
            await deployment.answer(lease)
    await deployment.collect()
    await deployment.control()
    return batch


async def test_failed_lines_become_a_new_batch(client: httpx.AsyncClient, deployment: Any) -> None:
    batch = await partly_failed(client, deployment)
    path = f"/v1/batches/{batch['id']}/retry"
    answer = await client.post(path, headers={"Idempotency-Key": "k"})
    assert answer.status_code == 200, answer.text
    again = answer.json()
    assert again["id"] != batch["id"]
    assert again["metadata"] == {"team": "a"}
    assert again["completion_window"] == "24h"
    await deployment.finish_all()
    done = (await client.get(f"/v1/batches/{again['id']}")).json()
    assert done["status"] == "completed"
    assert done["request_counts"]["completed"] == 2
    lines = (await client.get(f"/v1/files/{done['output_file_id']}/content")).text.splitlines()
    assert [json.loads(line)["custom_id"] for line in lines] == ["r-0", "r-1"]
    assert (await client.delete(f"/v1/files/{batch['input_file_id']}")).status_code == 200
    replayed = await client.post(path, headers={"Idempotency-Key": "k"})
    assert replayed.json()["id"] == again["id"]
    assert (await client.post(path)).json()["error"]["code"] == "input_file_deleted"
    nothing = await client.post(f"/v1/batches/{again['id']}/retry")
    assert (nothing.status_code, nothing.json()["error"]["code"]) == (409, "nothing_to_retry")


async def test_long_lines_are_read_some_at_once(
    client: httpx.AsyncClient, deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, asked = 1000, []
    read = obstore.get_ranges_async

    async def recorded(*args: Any, lengths: list[int], **kwargs: Any) -> Any:
        asked.append(list(lengths))
        return await read(*args, lengths=lengths, **kwargs)

    batch = await create(client, requests=requests(20))
    await deployment.control()
    await client.post(f"/v1/batches/{batch['id']}/cancel")
    await deployment.control()
    monkeypatch.setattr(obstore, "get_ranges_async", recorded)
    monkeypatch.setattr(retry, "_BYTES_AT_ONCE", most)
    retried = (await client.post(f"/v1/batches/{batch['id']}/retry")).json()
    assert sum(map(len, asked)) == 20
    assert len(asked) > 1
    assert all(sum(lengths[:-1]) < most for lengths in asked)
    await deployment.finish_all()
    done = (await client.get(f"/v1/batches/{retried['id']}")).json()
    assert done["request_counts"]["completed"] == 20


async def test_what_cannot_be_retried(
    client: httpx.AsyncClient, other_client: httpx.AsyncClient, deployment: Any
) -> None:
    running = await create(client, requests=requests(1))
    assert (await client.post(f"/v1/batches/{running['id']}/retry")).status_code == 409
    await deployment.finish_all()
    batch = await partly_failed(client, deployment)
    path = f"/v1/batches/{batch['id']}/retry"
    assert (await other_client.post(path)).status_code == 404
    assert (await client.post(path, json={"completion_window": "1y"})).status_code == 400
    await client.delete(f"/v1/files/{batch['input_file_id']}")
    gone = await client.post(path)
    assert (gone.status_code, gone.json()["error"]["code"]) == (409, "input_file_deleted")


async def test_an_estimate_stores_nothing(client: httpx.AsyncClient, deployment: Any) -> None:
    bad = {"custom_id": "bad", "body": {**BODY, "temperature": 9}}
    wanted = {**WANTED, "requests": [*requests(3), bad]}
    first = (await client.post("/v1/batches/estimate", json=wanted)).json()
    assert (first["requests"], first["invalid_requests"], first["complete"]) == (3, 1, True)
    assert [error["param"] for error in first["errors"]] == ["body.temperature"]
    assert (first["prompt_tokens"], first["max_completion_tokens"]) == (60, 24)
    assert first["expected_completion_tokens"] == 24
    assert first["max_amount_nano"] == 3 * (20 * 100 + 8 * 400) // 2
    assert first["expected_finish_at"] is None
    async with deployment.context.database.read() as session:
        for table in (Batch, File, Request):
            assert await session.scalar(select(func.count()).select_from(table)) == 0
    assert deployment.tasks.sent == []

    await create(client, requests=requests(2))
    await deployment.finish_all()  # answers are 5 tokens of 8
    second = (await client.post("/v1/batches/estimate", json=wanted)).json()
    assert second["expected_completion_tokens"] == 15
    assert second["expected_amount_nano"] == 3 * (20 * 100 + 5 * 400) // 2
    assert second["expected_finish_at"] is not None


async def test_an_estimate_of_a_file(
    client: httpx.AsyncClient, other_client: httpx.AsyncClient, deployment: Any
) -> None:
    line = json.dumps({"custom_id": "a", "method": "POST", "url": CHAT, "body": BODY})
    files = {"file": ("in.jsonl", line.encode())}
    upload = await client.post("/v1/files", files=files, data={"purpose": "batch"})
    wanted = {**WANTED, "input_file_id": upload.json()["id"]}
    answer = await client.post("/v1/batches/estimate", json=wanted)
    assert answer.json()["prompt_tokens"] == 20
    refused = await other_client.post("/v1/batches/estimate", json=wanted)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input_file_id")


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_errors_are_listed_up_to_a_limit(
    client: httpx.AsyncClient, deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(deployment.context.settings.__dict__, "batch_errors", 3)
    files = {"file": ("in.jsonl", b"x\n" * 1200)}  # several chunks
    upload = await client.post("/v1/files", files=files, data={"purpose": "batch"})
    batch = await create(client, input_file_id=upload.json()["id"])
    await deployment.control()
    failed = (await client.get(f"/v1/batches/{batch['id']}")).json()
    assert failed["status"] == "failed"
    shown = [(error["code"], error["line"]) for error in failed["errors"]["data"]]
    bad = [("invalid_json_line", number) for number in (1, 2, 3)]
    assert shown == [*bad, ("too_many_errors", None)]
