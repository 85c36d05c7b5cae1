"""Jobs over HTTP: submit, wait, list, cancel, expire."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import func, select, update

from gateway.jobs.service import expire_jobs
from gateway.kit.queues import Queues
from gateway.models import Request, Result, UsageRecord

CHAT = "/v1/chat/completions"


def chat(text: str = "Hi", **parameters: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **parameters}


async def submit(client: httpx.AsyncClient, **job: Any) -> dict[str, Any]:
    answer = await client.post("/v1/jobs", json={"endpoint": CHAT, "body": chat(), **job})
    assert answer.status_code == 202, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def test_a_job_runs_from_submission_to_a_billed_answer(
    client: httpx.AsyncClient, deployment: Any
) -> None:
    job = await submit(client, metadata={"run": "7"}, body=chat(max_tokens=9, n=2))
    assert job["status"] == "queued"
    assert job["response"] is None
    [lease] = await deployment.claim()  # the fast path has put it into the queue
    assert deployment.prompts.encode("user: Hi\nassistant: ") == lease.request.prompt_ids
    assert lease.request.sampling.max_tokens == 9
    assert await deployment.answer(lease, "bye", cached=4)
    await deployment.collect()

    done = (await client.get(f"/v1/jobs/{job['id']}")).json()
    assert done["status"] == "completed"
    assert done["metadata"] == {"run": "7"}
    assert done["response"]["status_code"] == 200
    body = done["response"]["body"]
    assert [choice["message"]["content"] for choice in body["choices"]] == ["bye", "bye"]
    assert body["model"] == "tiny"
    assert body["usage"] == {
        "prompt_tokens": 20,
        "completion_tokens": 6,
        "total_tokens": 26,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    async with deployment.context.database.read() as session:
        [usage] = await session.scalars(select(UsageRecord))
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (20, 4, 6)
    assert usage.amount_nano == 16 * 100 + 4 * 25 + 6 * 400
    assert await deployment.queue.known([job["id"]]) == [False]
    assert await deployment.stream.pending() == 0


async def test_a_long_poll_returns_when_the_job_ends(
    client: httpx.AsyncClient, deployment: Any
) -> None:
    job = await submit(client)
    [lease] = await deployment.claim()
    began = time.monotonic()
    poll = asyncio.create_task(client.get(f"/v1/jobs/{job['id']}?wait=30"))
    await asyncio.sleep(0)
    await deployment.answer(lease)
    await deployment.collect()
    assert (await poll).json()["status"] == "completed"
    assert time.monotonic() - began < 4
    still = await submit(client)
    waited = await client.get(f"/v1/jobs/{still['id']}?wait=0.05")
    assert waited.json()["status"] == "queued"


async def test_a_cancelled_job_ends_at_once_and_its_late_result_is_dropped(
    client: httpx.AsyncClient, deployment: Any
) -> None:
    job = await submit(client)
    [lease] = await deployment.claim()
    cancelled = await client.post(f"/v1/jobs/{job['id']}/cancel")
    assert cancelled.status_code == 200
    assert cancelled.json()["status"] == "cancelled"
    assert cancelled.json()["error"]["code"] == "cancelled"
    assert (await deployment.queue.renew("worker-1", [lease])).cancelled == (job["id"],)
    assert await deployment.answer(lease)
    await deployment.collect()
    assert (await client.get(f"/v1/jobs/{job['id']}")).json()["status"] == "cancelled"
    async with deployment.context.database.read() as session:
        assert await session.scalar(select(func.count()).select_from(UsageRecord)) == 0
        assert await session.scalar(select(func.count()).select_from(Result)) == 1
    again = await client.post(f"/v1/jobs/{job['id']}/cancel")
    assert again.status_code == 200


async def test_a_completed_job_cannot_be_cancelled(
    client: httpx.AsyncClient, deployment: Any
) -> None:
    job = await submit(client)
    await deployment.work()
    answer = await client.post(f"/v1/jobs/{job['id']}/cancel")
    assert answer.status_code == 409
    assert answer.json()["error"]["message"] == "Cannot cancel a job with status 'completed'."


async def test_a_job_past_its_deadline_expires(client: httpx.AsyncClient, deployment: Any) -> None:
    job = await submit(client, deadline=int(time.time()) + 60)
    other = await submit(client)
    async with deployment.context.database.write() as session:
        await session.execute(
            update(Request).where(Request.id == job["id"]).values(deadline_at=1000)
        )
    assert await expire_jobs(deployment.context) == 1
    shown = (await client.get(f"/v1/jobs/{job['id']}")).json()
    assert (shown["status"], shown["error"]["code"]) == ("expired", "request_timeout")
    assert (await client.get(f"/v1/jobs/{other['id']}")).json()["status"] == "queued"
    assert [lease.request.request_id for lease in await deployment.claim()] == [other["id"]]


async def test_jobs_are_listed_with_filters_and_never_across_tenants(
    client: httpx.AsyncClient, other_client: httpx.AsyncClient, deployment: Any
) -> None:
    first, second = await submit(client), await submit(client)
    [lease] = await deployment.claim(1)
    await deployment.answer(lease)
    await deployment.collect()
    done = (await client.get("/v1/jobs?status=completed")).json()
    assert [job["id"] for job in done["data"]] == [lease.request.request_id]
    assert done["data"][0]["response"]["status_code"] == 200
    page = (await client.get("/v1/jobs?limit=1")).json()
    assert page["has_more"]
    rest = (await client.get(f"/v1/jobs?after={page['last_id']}")).json()
    ids = [job["id"] for job in page["data"] + rest["data"]]
    assert ids == [second["id"], first["id"]]
    assert (await other_client.get("/v1/jobs")).json()["data"] == []
    for path in (f"/v1/jobs/{first['id']}", f"/v1/jobs/{first['id']}/cancel"):
        method = "POST" if path.endswith("cancel") else "GET"
        theirs = await other_client.request(method, path)
        unknown = await other_client.request(method, path.replace(first["id"], "job_nowhere"))
        assert theirs.status_code == unknown.status_code == 404
        assert theirs.text.replace(first["id"], "job_nowhere") == unknown.text


async def test_the_same_idempotency_key_makes_one_job(
    client: httpx.AsyncClient, deployment: Any
) -> None:
    headers = {"Idempotency-Key": "once"}
    wanted = {"endpoint": CHAT, "body": chat()}
    first = await client.post("/v1/jobs", json=wanted, headers=headers)
    again = await client.post("/v1/jobs", json=wanted, headers=headers)
    assert again.json() == first.json()
    assert again.status_code == 202
    other = await client.post("/v1/jobs", json={**wanted, "priority": "batch"}, headers=headers)
    assert other.status_code == 409
    assert len(await deployment.claim()) == 1


async def test_a_repeated_call_is_answered_whatever_became_of_what_it_named(
    client: httpx.AsyncClient, deployment: Any
) -> None:
    made = await client.post("/v1/webhook_endpoints", json={"url": "https://example.com/hook"})
    endpoint = made.json()["id"]
    wanted = {"endpoint": CHAT, "body": chat(), "webhook": endpoint}
    headers = {"Idempotency-Key": "once"}
    first = await client.post("/v1/jobs", json=wanted, headers=headers)
    assert first.status_code == 202, first.text
    await client.delete(f"/v1/webhook_endpoints/{endpoint}")
    assert (await client.post("/v1/jobs", json=wanted)).status_code == 400
    again = await client.post("/v1/jobs", json=wanted, headers=headers)
    assert (again.status_code, again.json()) == (202, first.json())
    assert again.headers["Idempotent-Replayed"] == "true"


async def test_a_full_window_leaves_the_job_to_the_dispatcher(
    client: httpx.AsyncClient, deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(deployment.context.settings.__dict__, "queue_window", 2)
    for _ in range(3):
        await submit(client)
    assert await deployment.dispatch() == 0
    leases = await deployment.claim()
    assert len(leases) == 2
    await deployment.answer(leases[0])
    await deployment.collect()
    assert await deployment.dispatch() == 1


async def test_a_job_is_accepted_while_redis_is_away(
    app: FastAPI, client: httpx.AsyncClient, deployment: Any
) -> None:
    alive = app.state.context
    queues = Queues("redis://127.0.0.1:1/0")
    app.state.context = dataclasses.replace(alive, queues=queues)
    began = time.monotonic()
    job = await submit(client)
    assert time.monotonic() - began < 5
    app.state.context = alive
    await queues.close()
    assert await deployment.work() == 1
    assert (await client.get(f"/v1/jobs/{job['id']}")).json()["status"] == "completed"


@pytest.mark.parametrize(
    ("job", "param", "code"),
    [
        ({"body": {"messages": []}}, "model", "missing_required_parameter"),
        ({"body": chat(tools=[{"type": "function"}])}, "tools", "unsupported_parameter"),
        ({"body": chat(stream=True)}, "stream", "unsupported_parameter"),
        ({"body": chat("a\0b")}, "body", "invalid_value"),
        ({"endpoint": "/v1/embeddings"}, "endpoint", "invalid_value"),
        ({"deadline": 5}, "deadline", "invalid_value"),
        ({"metadata": {"k": 1}}, "metadata.k", "invalid_type"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "invalid_value"),
        ({"webhook": "x"}, "webhook", "invalid_value"),
        ({"callback": "x"}, "callback", "unknown_parameter"),
    ],
)
async def test_a_bad_job_is_refused_by_name(
    client: httpx.AsyncClient, deployment: Any, job: dict[str, Any], param: str, code: str
) -> None:
    answer = await client.post("/v1/jobs", json={"endpoint": CHAT, "body": chat(), **job})
    assert answer.status_code == 400
    assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == (param, code)


async def test_an_unknown_model_is_404(client: httpx.AsyncClient, deployment: Any) -> None:
    answer = await client.post(
        "/v1/jobs", json={"endpoint": CHAT, "body": {**chat(), "model": "nope"}}
    )
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
