"""Streams as the official client reads them, from a worker runtime over a real Redis."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from sqlalchemy import func, select

from gateway.models import Request, UsageRecord
from worker.protocol.messages import Delta, Finished
from worker.protocol.types import Capacity, Choice, TokenUsage, WorkerLimits
from worker.queue.base import Lease, WorkerInfo

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

MESSAGES: Any = [{"role": "user", "content": "Hi"}]
ROOMY = WorkerLimits(context_tokens=1024, kv_tokens=100_000, adapter_rank=64)
BOUND = 15.0


@pytest.fixture
async def announced(deployment: Any) -> None:
    free = Capacity(kv_tokens=1, adapter_rank=1, requests=1)
    await deployment.context.queues.directory.announce(WorkerInfo("w", "tiny", ROOMY, free))


async def texts_of(stream: Any, chat: bool = True) -> dict[int, str]:
    texts: dict[int, str] = {}
    async for chunk in stream:
        for choice in chunk.choices:
            new = choice.delta.content if chat else choice.text
            texts[choice.index] = texts.get(choice.index, "") + (new or "")
    return texts


async def claim_one(deployment: Any) -> Lease:
    async with asyncio.timeout(BOUND):
        while not (leases := await deployment.claim()):  # noqa: ASYNC110  enqueued by the call
            await asyncio.sleep(0.005)
    lease: Lease = leases[0]
    return lease


async def say(deployment: Any, lease: Lease, text: str, index: int = 0) -> None:
    request = lease.request
    for place, char in enumerate(text, index):
        ids = deployment.prompts.encode(char)
        event = Delta(request.request_id, request.attempt, 0, place, ids, char)
        assert await deployment.queue.emit(lease, event)


async def test_chunks_say_what_the_whole_answer_says(
    streaming_client: AsyncOpenAI, null_worker: None
) -> None:
    asked: Any = {"model": "tiny", "messages": MESSAGES, "n": 3, "seed": 7, "max_tokens": 60}
    asked |= {"logprobs": True, "top_logprobs": 1}
    whole = await streaming_client.chat.completions.create(**asked)
    stream = await streaming_client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    *others, last = chunks
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in others)
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    for choice in whole.choices:
        parts = [part for chunk in others for part in chunk.choices if part.index == choice.index]
        assert parts[0].delta.role == "assistant"
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        assert [part.finish_reason for part in parts if part.finish_reason] == [
            choice.finish_reason
        ]
        tokens = [each for part in parts if part.logprobs for each in part.logprobs.content or []]
        assert choice.logprobs is not None
        assert tokens == choice.logprobs.content
    assert len(others) > 20


async def test_a_stop_string_never_shows(streaming_client: AsyncOpenAI, null_worker: None) -> None:
    asked: Any = {"model": "tiny", "prompt": "Hi", "seed": 3, "max_tokens": 100, "logprobs": 0}
    asked["extra_body"] = {"ignore_eos": True}
    whole = await streaming_client.completions.create(**asked)
    stop = whole.choices[0].text[30:33]
    stopped = await streaming_client.completions.create(**asked, stop=stop)
    chunks = [
        chunk
        async for chunk in await streaming_client.completions.create(
            **asked, stop=stop, stream=True
        )
    ]
    parts = [part for chunk in chunks for part in chunk.choices]
    text = "".join(part.text for part in parts)
    assert text == stopped.choices[0].text
    assert stop not in text
    assert parts[-1].finish_reason == "stop"
    offsets = [at for part in parts if part.logprobs for at in part.logprobs.text_offset or []]
    logprobs = stopped.choices[0].logprobs
    assert logprobs is not None
    assert offsets == logprobs.text_offset
    assert {chunk.object for chunk in chunks} == {"text_completion"}


async def test_a_stream_is_billed_once(
    streaming_client: AsyncOpenAI, deployment: Any, null_worker: None
) -> None:
    stream = await streaming_client.completions.create(model="tiny", prompt="Hi", stream=True)
    await texts_of(stream, chat=False)
    async with asyncio.timeout(BOUND):
        while True:
            async with deployment.context.database.read() as session:
                count = await session.scalar(select(func.count()).select_from(UsageRecord))
            if count:
                break
            await asyncio.sleep(0.01)
    assert count == 1


@pytest.mark.parametrize("step_seconds", [0.02])
async def test_a_client_that_leaves_stops_the_work(
    streaming_client: AsyncOpenAI, deployment: Any, null_worker: None
) -> None:
    stream = await streaming_client.completions.create(
        model="tiny", prompt="Hi", stream=True, max_tokens=1000, extra_body={"ignore_eos": True}
    )
    async for _ in stream:
        break
    await stream.close()
    async with asyncio.timeout(BOUND):
        while True:
            async with deployment.context.database.read() as session:
                [row] = await session.scalars(select(Request))
            leased = (await deployment.queue.depth())["interactive"].leased
            if row.state == "cancelled" and not leased:
                return
            await asyncio.sleep(0.01)


async def test_errors_before_the_first_token_are_http_errors(
    streaming_client: AsyncOpenAI, deployment: Any
) -> None:
    def create(**changes: Any) -> Any:
        asked = {"model": "tiny", "messages": MESSAGES, "stream": True, **changes}
        return streaming_client.chat.completions.create(**asked)

    with pytest.raises(openai.NotFoundError):
        await create(model="nobody")
    with pytest.raises(openai.InternalServerError) as caught:
        await create()
    assert caught.value.code == "model_unavailable"
    with pytest.raises(openai.BadRequestError) as refused:
        await create(stream=False, stream_options={"include_usage": True})
    assert refused.value.param == "stream_options"
    free = Capacity(kv_tokens=1, adapter_rank=1, requests=1)
    await deployment.context.queues.directory.announce(WorkerInfo("w", "tiny", ROOMY, free))
    call = asyncio.create_task(create())
    await deployment.fail(await claim_one(deployment), "adapter_invalid")
    await deployment.collect()
    with pytest.raises(openai.BadRequestError) as failed:
        await call
    assert failed.value.code == "adapter_invalid"


async def again(deployment: Any, lease: Lease) -> Lease:
    """The attempt fails, and the next one is claimed."""
    await deployment.fail(lease, "engine_error", retryable=True)
    await deployment.collect()
    await deployment.dispatch()
    second = await claim_one(deployment)
    assert second.request.attempt == lease.request.attempt + 1
    assert second.request.stream
    return second


async def test_what_was_sent_is_not_said_again(
    streaming_client: AsyncOpenAI, deployment: Any, announced: None
) -> None:
    call = asyncio.create_task(
        streaming_client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    )
    lease = await claim_one(deployment)
    await say(deployment, lease, "hel")
    stream = await call
    received = asyncio.create_task(texts_of(stream))
    lease = await again(deployment, lease)
    await say(deployment, lease, "hello")
    await deployment.answer(lease, "hello there")
    assert await received == {0: "hello there"}


async def test_another_answer_ends_the_stream_with_an_error(
    streaming_client: AsyncOpenAI, deployment: Any, announced: None
) -> None:
    call = asyncio.create_task(
        streaming_client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    )
    lease = await claim_one(deployment)
    await say(deployment, lease, "hel")
    received = asyncio.create_task(texts_of(await call))
    await say(deployment, await again(deployment, lease), "hal")
    with pytest.raises(openai.APIError) as caught:
        await received
    assert caught.value.code == "stream_mismatch"
    async with deployment.context.database.read() as session:
        [row] = await session.scalars(select(Request))
    assert row.state == "cancelled"


async def test_a_lost_token_stream_costs_only_speed(
    streaming_client: AsyncOpenAI, deployment: Any, announced: None
) -> None:
    call = asyncio.create_task(
        streaming_client.completions.create(model="tiny", prompt="Hi", stream=True)
    )
    lease = await claim_one(deployment)
    await say(deployment, lease, "he")
    received = asyncio.create_task(texts_of(await call, chat=False))
    await say(deployment, lease, "o", index=4)
    request = lease.request
    choice = Choice(0, "hello", deployment.prompts.encode("hello"), "stop")
    finished = Finished(request.request_id, request.attempt, (choice,), TokenUsage(2, 0, 5), "w")
    await deployment.queue.finish(lease, finished)
    assert await received == {0: "hello"}


async def test_the_recorded_answer_is_streamed_when_redis_has_lost_it(
    streaming_client: AsyncOpenAI, deployment: Any, announced: None, redis_url: str
) -> None:
    call = asyncio.create_task(
        streaming_client.completions.create(model="tiny", prompt="Hi", stream=True)
    )
    lease = await claim_one(deployment)
    request = lease.request
    choice = Choice(0, "hello", deployment.prompts.encode("hello"), "stop")
    finished = Finished(request.request_id, request.attempt, (choice,), TokenUsage(2, 0, 5), "w")
    await deployment.fold.commit([finished])
    await deployment.context.queues.bell.ring([request.request_id])
    assert await texts_of(await call, chat=False) == {0: "hello"}


async def test_curl_sees_server_sent_events(api_url: str, tenant: Any, null_worker: None) -> None:
    async with httpx.AsyncClient(base_url=api_url, headers=tenant.headers) as client:
        body = {"model": "tiny", "prompt": "Hi", "stream": True, "max_tokens": 3}
        answer = await client.post("/v1/completions", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["x-request-id"]
    *events, last, end = answer.text.split("\n\n")
    assert end == ""
    assert last == "data: [DONE]"
    assert all(event.startswith("data: {") for event in events)


async def test_a_stream_is_replayed_by_its_key(
    streaming_client: AsyncOpenAI, null_worker: None
) -> None:
    async def read() -> Any:
        stream = await streaming_client.completions.create(
            model="tiny", prompt="Hi", stream=True, extra_headers={"Idempotency-Key": "k"}
        )
        replayed = stream.response.headers.get("idempotent-replayed")
        return replayed, [chunk.id async for chunk in stream]

    (first, ids), (second, again) = await read(), await read()
    assert (first, second) == (None, "true")
    assert set(ids) == set(again)
