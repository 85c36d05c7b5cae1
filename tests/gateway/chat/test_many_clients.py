"""A thousand clients of one API process: what they cost Redis and memory, and that one who does
not read holds up nobody."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from tests.gateway.served import served

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

CLIENTS = 1000
BOUND = 240.0
CONNECTIONS = 16
TOKENS = 8


@pytest.fixture
def system(settings: Any, tiny_model: Path) -> Iterator[tuple[int, psutil.Process]]:
    options = {"BATTEN_NULL_DELAY": "0.01", "BATTEN_REDIS_CONNECTIONS": str(CONNECTIONS)}
    with served(settings, tiny_model, **options) as running:
        yield running


async def ask(port: int, key: str, reads: asyncio.Event | None = None, **body: Any) -> bytes:
    """One POST on a connection of its own, whose answer is not read before `reads`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps({"model": "tiny", "prompt": "Hi", **body}).encode()
    head = [
        "POST /v1/completions HTTP/1.1",
        "Host: gateway.test",
        f"Authorization: Bearer {key}",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
        "Connection: close",
    ]
    try:
        writer.write("\r\n".join([*head, "", ""]).encode() + content)
        if reads is not None:
            await reads.wait()
        return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


def is_whole(answer: bytes, streamed: bool) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), answer[:500]
    if streamed:
        return b"data: [DONE]" in body and b'"finish_reason":"length"' in body
    return bool(json.loads(body)["usage"]["completion_tokens"] == TOKENS)


async def test_a_thousand_clients(
    system: tuple[int, psutil.Process], tenant: Any, redis_url: str
) -> None:
    port, api = system
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * CLIENTS)), hard))
    memory = api.memory_info().rss
    counts = []

    async def call(number: int) -> bool:
        streamed = number % 2 == 0
        body = {"max_tokens": TOKENS, "seed": number, "stream": streamed}
        return is_whole(await ask(port, tenant.secret, **body), streamed)

    async def watch() -> None:
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            while True:
                counts.append(len(await client.client_list()))
                await asyncio.sleep(0.05)

    async with asyncio.timeout(BOUND):
        reads = asyncio.Event()
        body = {"max_tokens": 900, "n": 4, "logprobs": 1, "stream": True}
        slow = asyncio.create_task(ask(port, tenant.secret, reads, **body))
        watching = asyncio.create_task(watch())
        assert all(await asyncio.gather(*(call(number) for number in range(CLIENTS))))
        reads.set()
        assert is_whole(await slow, True)
        watching.cancel()
        await asyncio.wait([watching])
    # Of the API, the collector, the worker and this test: as many as for a few clients.
    assert max(counts) <= 2 * CONNECTIONS + 16
    grown = api.memory_info().rss - memory
    assert grown < 300 * 2**20, f"{grown / 2**20:.0f} MiB"


async def test_a_client_that_does_not_read_holds_up_nobody(
    app: Any, tenant: Any, streaming_client: Any, null_worker: None
) -> None:
    """It is read nothing for, and has everything once it reads."""
    body = json.dumps({"model": "tiny", "prompt": "Hi", "stream": True, "max_tokens": 200}).encode()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "headers": [
            (b"authorization", f"Bearer {tenant.secret}".encode()),
            (b"content-type", b"application/json"),
        ],
        "client": ("127.0.0.1", 1),
        "server": ("gateway.test", 80),
    }
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])
    reads, stuck, sent = asyncio.Event(), asyncio.Event(), bytearray()

    async def receive() -> Any:
        if (message := next(messages, None)) is None:
            await asyncio.Event().wait()
        return message

    async def send(message: Any) -> None:
        sent.extend(message.get("body", b""))
        if sent and not reads.is_set():
            stuck.set()
            await reads.wait()

    slow = asyncio.create_task(app(scope, receive, send))
    async with asyncio.timeout(20):
        await stuck.wait()
        held = bytes(sent)
        for seed in range(5):
            stream = await streaming_client.completions.create(
                model="tiny", prompt="Ho", stream=True, seed=seed
            )
            assert [chunk async for chunk in stream][-1].choices[0].finish_reason
        assert sent == held
        assert b"[DONE]" not in held
        reads.set()
        await slow
    assert sent.endswith(b"data: [DONE]\n\n")
