"""Synchronous calls through the official client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from redis.asyncio import Redis
from sqlalchemy import func, select

from gateway.jobs.service import EXPIRED, end_early
from gateway.models import Request, UsageRecord
from tests.gateway.test_isolation import add_adapter
from worker.protocol.messages import Finished
from worker.protocol.types import Capacity, Choice, TokenLogprob, TokenUsage, WorkerLimits
from worker.queue.base import Lease, QueueUnavailable, WorkerInfo

MESSAGES: Any = [{"role": "user", "content": "Hi"}]
ROOMY = WorkerLimits(context_tokens=1024, kv_tokens=100_000, adapter_rank=64)


@pytest.fixture
async def worker(deployment: Any) -> None:
    free = Capacity(kv_tokens=1, adapter_rank=1, requests=1)
    await deployment.context.queues.directory.announce(WorkerInfo("w", "tiny", ROOMY, free))


async def claim_one(deployment: Any) -> Lease:
    async with asyncio.timeout(10):
        while not (leases := await deployment.claim()):  # noqa: ASYNC110  enqueued by the call
            await asyncio.sleep(0)
    lease: Lease = leases[0]
    return lease


@asynccontextmanager
async def answered_by(deployment: Any, text: str = "hello") -> AsyncIterator[None]:
    async def answer() -> None:
        lease = await claim_one(deployment)
        await deployment.answer(lease, text)
        await deployment.collect()

    task = asyncio.create_task(answer())
    yield
    await task


async def test_a_chat_completion_is_answered_and_billed(
    openai_client: AsyncOpenAI, deployment: Any, worker: None
) -> None:
    async with answered_by(deployment):
        answer = await openai_client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=9
        )
    assert answer.choices[0].message.content == "hello"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.system_fingerprint is not None
    assert answer.usage is not None
    assert answer.usage.total_tokens == 20 + 5
    async with deployment.context.database.read() as session:
        [row] = await session.scalars(select(Request))
        assert (row.kind, row.request_class) == ("call", "interactive")
        assert await session.scalar(select(func.count()).select_from(UsageRecord)) == 1


async def test_a_call_that_was_accepted_waits_for_a_full_redis(
    openai_client: AsyncOpenAI, deployment: Any, worker: None, redis_url: str
) -> None:
    async with Redis.from_url(redis_url) as server:
        await server.config_set("maxmemory", "1")
        try:
            call = asyncio.create_task(
                openai_client.chat.completions.create(model="tiny", messages=MESSAGES)
            )
            async with asyncio.timeout(10):
                while not await _stored(deployment):  # noqa: ASYNC110  the API stores it
                    await asyncio.sleep(0)
            with pytest.raises(QueueUnavailable):
                await deployment.dispatch()
        finally:
            await server.config_set("maxmemory", "0")
    await deployment.dispatch()
    async with answered_by(deployment):
        answer = await call
    assert answer.choices[0].message.content == "hello"
    assert await _stored(deployment) == 1


async def _stored(deployment: Any) -> int:
    async with deployment.context.database.read() as session:
        return await session.scalar(select(func.count()).select_from(Request)) or 0


async def test_a_text_completion_takes_text_or_token_ids(
    openai_client: AsyncOpenAI, deployment: Any, worker: None
) -> None:
    for prompt in ("Hi", list(deployment.prompts.encode("Hi")), ["Hi"]):
        async with answered_by(deployment, " there"):
            answer = await openai_client.completions.create(model="tiny", prompt=prompt)
        assert answer.choices[0].text == " there"
        assert answer.object == "text_completion"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 2


async def test_log_probabilities_name_tokens_and_their_bytes(
    openai_client: AsyncOpenAI, deployment: Any, worker: None
) -> None:
    async def answer() -> None:
        lease = await claim_one(deployment)
        assert lease.request.sampling.logprobs == 2
        first, second = deployment.prompts.encode("é")
        logprobs = (
            TokenLogprob(first, -0.5, ((first, -0.5), (second, float("-inf")))),
            TokenLogprob(second, -0.25, ()),
        )
        choice = Choice(0, "é", (first, second), "length", logprobs)
        request = lease.request
        event = Finished(request.request_id, 1, (choice,), TokenUsage(20, 0, 2), "w")
        await deployment.queue.finish(lease, event)
        await deployment.collect()

    task = asyncio.create_task(answer())
    completion = await openai_client.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2
    )
    await task
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    content = logprobs.content or []
    assert bytes([byte for each in content for byte in each.bytes or []]).decode() == "é"
    assert [each.logprob for each in content] == [-0.5, -0.25]
    assert [each.logprob for each in content[0].top_logprobs] == [-0.5, -9999.0]


async def test_without_a_live_worker_it_is_503(openai_client: AsyncOpenAI, deployment: Any) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        await openai_client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "5"


async def test_a_failure_of_the_engine_has_its_status(
    openai_client: AsyncOpenAI, deployment: Any, worker: None
) -> None:
    async def fail() -> None:
        lease = await claim_one(deployment)
        await deployment.fail(lease, "adapter_invalid")
        await deployment.collect()

    task = asyncio.create_task(fail())
    with pytest.raises(openai.BadRequestError) as caught:
        await openai_client.chat.completions.create(model="tiny", messages=MESSAGES)
    await task
    assert caught.value.code == "adapter_invalid"


async def test_too_long_a_call_is_given_up(
    openai_client: AsyncOpenAI, deployment: Any, worker: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(deployment.context.settings.__dict__, "sync_seconds", 0.05)
    with pytest.raises(openai.InternalServerError) as caught:
        await openai_client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert caught.value.code == "request_timeout"
    assert await deployment.claim() == []


async def test_a_client_that_disconnects_cancels(
    app: Any, tenant: Any, deployment: Any, worker: None
) -> None:
    body = b'{"model":"tiny","messages":[{"role":"user","content":"Hi"}]}'
    headers = [
        (b"authorization", f"Bearer {tenant.secret}".encode()),
        (b"content-type", b"application/json"),
    ]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("gateway.test", 80),
    }
    gone = asyncio.Event()
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])
    sent: list[Any] = []

    async def receive() -> Any:
        if (message := next(messages, None)) is not None:
            return message
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    call = asyncio.create_task(app(scope, receive, send))
    lease = await claim_one(deployment)
    gone.set()
    await call
    assert sent == []
    assert (await deployment.queue.renew("worker-1", [lease])).cancelled == (
        lease.request.request_id,
    )
    async with deployment.context.database.read() as session:
        [row] = await session.scalars(select(Request))
    assert row.state == "cancelled"


async def test_the_same_call_again_gives_the_first_answer(
    openai_client: AsyncOpenAI, deployment: Any, worker: None
) -> None:
    def call(**changes: Any) -> Any:
        asked = {"model": "tiny", "prompt": "Hi", "extra_headers": {"Idempotency-Key": "k"}}
        return asyncio.create_task(openai_client.completions.create(**{**asked, **changes}))

    first = call()
    lease = await claim_one(deployment)
    joined = call()  # while the first one waits
    with pytest.raises(openai.ConflictError) as caught:
        await call(prompt="Ho")
    assert caught.value.code == "idempotency_conflict"
    await deployment.answer(lease, "once")
    await deployment.collect()
    assert (await first) == (await joined) == (await call())
    async with deployment.context.database.read() as session:
        assert await session.scalar(select(func.count()).select_from(UsageRecord)) == 1


async def test_a_call_that_came_to_nothing_leaves_its_key_free(
    openai_client: AsyncOpenAI, deployment: Any, worker: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create() -> Any:
        headers = {"Idempotency-Key": "k"}
        return openai_client.completions.create(model="tiny", prompt="Hi", extra_headers=headers)

    with monkeypatch.context() as patch:
        patch.setitem(deployment.context.settings.__dict__, "sync_seconds", 0.05)
        with pytest.raises(openai.InternalServerError):
            await create()
    async with answered_by(deployment, "later"):
        assert (await create()).choices[0].text == "later"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_key_is_free_again_when_the_process_that_served_its_call_died(
    openai_client: AsyncOpenAI, deployment: Any, worker: None, stream: bool
) -> None:
    async def create() -> Any:
        headers = {"Idempotency-Key": "k"}
        return await openai_client.completions.create(
            model="tiny", prompt="Hi", stream=stream, extra_headers=headers
        )

    serving = asyncio.create_task(create())
    lease = await claim_one(deployment)
    serving.cancel()
    await asyncio.wait({serving})
    await end_early(deployment.context, [lease.request.request_id], EXPIRED)
    with pytest.raises(openai.InternalServerError) as caught:
        await create()
    assert caught.value.code == "request_timeout"
    async with answered_by(deployment, "later"):
        answer = await create()
        texts = [chunk.choices[0].text async for chunk in answer] if stream else []
    assert "".join(texts) or answer.choices[0].text == "later"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_given_again_when_its_adapter_is_deleted(
    openai_client: AsyncOpenAI,
    client: httpx.AsyncClient,
    deployment: Any,
    tenant: Any,
    worker: None,
    stream: bool,
) -> None:
    await add_adapter(tenant, deployment)

    async def ask(key: str) -> str:
        answer = await openai_client.completions.create(
            model="somebodys-adapter",
            prompt="Hi",
            stream=stream,
            extra_headers={"Idempotency-Key": key},
        )
        if not stream:
            return answer.choices[0].text
        return "".join([chunk.choices[0].text async for chunk in answer])

    async with answered_by(deployment, "once"):
        assert await ask("k") == "once"
    assert (await client.delete("/v1/adapters/somebodys-adapter")).status_code == 200
    assert await ask("k") == "once"
    with pytest.raises(openai.NotFoundError):
        await ask("another key")
    async with deployment.context.database.read() as session:
        assert await session.scalar(select(func.count()).select_from(UsageRecord)) == 1
