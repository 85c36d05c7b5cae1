"""What an operator sees of the queue, and the way back for what no worker could read."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import pytest
import redis

JOB = {
    "endpoint": "/v1/completions",
    "body": {"model": "tiny", "prompt": "hello", "max_tokens": 4},
}


@pytest.fixture
async def job(client: httpx.AsyncClient, deployment: Any) -> str:
    """A job that is ready in the queue."""
    answer = await client.post("/v1/jobs", json=JOB)
    assert answer.status_code < 300, answer.text
    await deployment.dispatch()
    return answer.json()["id"]


def spoil(redis_url: str, request_id: str) -> None:
    """Overwrite a request's bytes with those of a later version."""
    with redis.Redis.from_url(redis_url) as server:
        server.hset(f"batten:{{tiny}}:item:{request_id}", "payload", b"\xffnot ours")


async def test_the_queue_shows_what_waits_and_whose_turn_it_is(
    admin: httpx.AsyncClient, deployment: Any, job: str, tenant: Any
) -> None:
    shown = (await admin.get("/v1/admin/queue")).json()["data"]
    assert [each["model"] for each in shown] == ["tiny"]
    assert shown[0]["classes"]["standard"] == {"ready": 1, "leased": 0}
    assert list(shown[0]["counters"]["standard"]) == [tenant.tenant_id]
    await deployment.claim()
    shown = (await admin.get("/v1/admin/queue")).json()["data"]
    assert shown[0]["classes"]["standard"] == {"ready": 0, "leased": 1}


async def test_a_dead_letter_is_listed_and_sent_round_again(
    admin: httpx.AsyncClient, client: httpx.AsyncClient, deployment: Any, redis_url: str, job: str
) -> None:
    spoil(redis_url, job)
    assert await deployment.claim() == []
    (letter,) = (await admin.get("/v1/admin/dead_letters")).json()["data"]
    assert (letter["model"], letter["kind"], letter["request_id"]) == ("tiny", "request", job)
    assert base64.b64decode(letter["data"]) == b"\xffnot ours"
    assert "version" in letter["reason"]

    answer = await admin.post(f"/v1/admin/dead_letters/{job}/requeue")
    assert (answer.status_code, answer.json()["request_id"]) == (202, job)
    await deployment.finish_all()
    assert (await client.get(f"/v1/jobs/{job}")).json()["status"] == "completed"
    again = await admin.post(f"/v1/admin/dead_letters/{job}/requeue")
    assert again.status_code == 409


async def test_only_an_operator_and_only_what_is_dead(
    admin: httpx.AsyncClient, client: httpx.AsyncClient, job: str
) -> None:
    assert (await admin.post(f"/v1/admin/dead_letters/{job}/requeue")).status_code == 404
    for path in ("/v1/admin/queue", "/v1/admin/dead_letters"):
        assert (await client.get(path)).status_code in {401, 403}
