"""A tenant's limits: requests and tokens per minute, and jobs that have not ended."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest
import redis
from openai import AsyncOpenAI

from gateway.kit.rates import Bucket
from worker.protocol.types import Capacity, WorkerLimits
from worker.queue.base import WorkerInfo

BODY = {"model": "tiny", "prompt": "Hi", "max_tokens": 8}  # 10 tokens at most
JOB = {"endpoint": "/v1/completions", "body": BODY}


async def limit(admin: httpx.AsyncClient, tenant: Any, **limits: int) -> None:
    answer = await admin.post("/v1/admin/limits", json={"tenant": tenant.tenant_id, **limits})
    assert answer.status_code == 200, answer.text


async def submit(client: httpx.AsyncClient, **headers: str) -> httpx.Response:
    return await client.post("/v1/jobs", json=JOB, headers=headers)


@pytest.fixture
def warm(redis_url: str) -> None:
    """A Redis that has been up for long: what it does not know was not used."""
    with redis.Redis.from_url(redis_url) as server:
        server.set("batten:{limits}:born", 1)


async def test_operators_set_limits(
    admin: httpx.AsyncClient, client: httpx.AsyncClient, tenant: Any
) -> None:
    path = f"/v1/admin/limits/{tenant.tenant_id}"
    assert (await admin.get(path)).json()["requests_per_minute"] is None
    await limit(admin, tenant, requests_per_minute=5, concurrent_jobs=2)
    shown = (await admin.get(path)).json()
    assert (shown["requests_per_minute"], shown["tokens_per_minute"]) == (5, None)
    assert shown in (await admin.get("/v1/admin/limits")).json()["data"]
    await limit(admin, tenant, tokens_per_minute=9)
    assert (await admin.get(path)).json()["requests_per_minute"] is None
    wrong = {"tenant": tenant.tenant_id, "tokens_per_minute": 0}
    assert (await admin.post("/v1/admin/limits", json=wrong)).status_code == 400
    assert (await client.get(path)).status_code == 403
    assert (await admin.get("/v1/admin/limits/nobody")).status_code == 404


async def test_requests_per_minute(
    admin: httpx.AsyncClient,
    client: httpx.AsyncClient,
    other_client: httpx.AsyncClient,
    tenant: Any,
    deployment: Any,
    warm: None,
) -> None:
    assert "x-ratelimit-limit-requests" not in (await submit(client)).headers
    await limit(admin, tenant, requests_per_minute=2)
    first = await submit(client, **{"Idempotency-Key": "k"})
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-reset-requests"] == "30s"
    assert "x-ratelimit-limit-tokens" not in first.headers
    assert (await submit(client)).status_code == 202
    refused = await submit(client)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 0 < int(refused.headers["retry-after"]) <= 30
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.headers["x-ratelimit-reset-requests"] in {"1m0s", "60s", "59s"}
    assert (await submit(client, **{"Idempotency-Key": "k"})).status_code == 202  # costs nothing
    assert (await submit(other_client)).status_code == 202


async def test_tokens_per_minute_of_synchronous_calls(
    admin: httpx.AsyncClient,
    openai_client: AsyncOpenAI,
    tenant: Any,
    deployment: Any,
    warm: None,
) -> None:
    roomy = WorkerLimits(context_tokens=1024, kv_tokens=100_000, adapter_rank=64)
    free = Capacity(kv_tokens=1, adapter_rank=1, requests=1)
    await deployment.context.queues.directory.announce(WorkerInfo("w", "tiny", roomy, free))
    await limit(admin, tenant, tokens_per_minute=25)
    calls = [asyncio.create_task(openai_client.completions.create(**BODY)) for _ in range(2)]
    leases: list[Any] = []
    async with asyncio.timeout(10):
        while len(leases) < 2:
            leases += await deployment.claim()
            await asyncio.sleep(0.001)
    with pytest.raises(openai.RateLimitError) as caught:
        await openai_client.completions.create(**BODY)
    headers = caught.value.response.headers
    assert headers["x-ratelimit-remaining-tokens"] == "5"
    assert 0 < int(headers["retry-after"]) <= 12
    with pytest.raises(openai.RateLimitError) as large:
        await openai_client.completions.create(**{**BODY, "max_tokens": 100})
    assert large.value.code == "request_too_large"
    for lease in leases:
        await deployment.answer(lease)
    await deployment.collect()
    await asyncio.gather(*calls)


async def test_limits_hold_for_calls_at_once(context: Any, warm: None) -> None:
    bucket = Bucket("requests", 10, 1)
    taken = await asyncio.gather(*(context.queues.rates.take("t", [bucket]) for _ in range(30)))
    assert sum(each.wait_ms == 0 for each in taken) == 10


async def test_what_redis_lost_is_counted_again(
    admin: httpx.AsyncClient,
    client: httpx.AsyncClient,
    tenant: Any,
    deployment: Any,
    redis_url: str,
) -> None:
    await limit(admin, tenant, requests_per_minute=2)
    for _ in range(2):
        assert (await submit(client)).status_code == 202
    await deployment.work()
    with redis.Redis.from_url(redis_url) as server:
        server.flushall()
    assert (await submit(client)).status_code == 429


async def test_jobs_that_have_not_ended(
    admin: httpx.AsyncClient, client: httpx.AsyncClient, tenant: Any, deployment: Any
) -> None:
    await limit(admin, tenant, concurrent_jobs=2)
    answers = await asyncio.gather(*(submit(client) for _ in range(5)))
    assert sorted(answer.status_code for answer in answers) == [202, 202, 429, 429, 429]
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.json()["error"]["code"] == "concurrent_jobs_exceeded"
    assert refused.headers["retry-after"] == "5"
    await deployment.work()
    assert (await submit(client)).status_code == 202


async def create_batch(client: httpx.AsyncClient, **headers: str) -> httpx.Response:
    requests = [{"custom_id": "a", "body": BODY}]
    wanted = {"endpoint": "/v1/completions", "completion_window": "24h", "requests": requests}
    return await client.post("/v1/batches", json=wanted, headers=headers)


async def test_batches_per_hour(
    admin: httpx.AsyncClient,
    client: httpx.AsyncClient,
    other_client: httpx.AsyncClient,
    tenant: Any,
    deployment: Any,
    redis_url: str,
) -> None:
    await limit(admin, tenant, batches_per_hour=2)
    first = await create_batch(client, **{"Idempotency-Key": "k"})
    assert first.status_code == 200, first.text
    assert first.headers["x-ratelimit-remaining-batches"] == "1"
    assert (await create_batch(client)).status_code == 200
    refused = await create_batch(client)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 0 < int(refused.headers["retry-after"]) <= 1800
    assert (await create_batch(client, **{"Idempotency-Key": "k"})).status_code == 200
    assert (await create_batch(other_client)).headers["x-ratelimit-limit-batches"] == "2000"
    with redis.Redis.from_url(redis_url) as server:
        server.flushall()
    assert (await create_batch(client)).status_code == 429  # counted again from SQL
    await limit(admin, tenant, batches_per_hour=3)
    assert (await create_batch(client)).status_code == 200
