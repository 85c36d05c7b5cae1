"""A receiver that can fail in every way, and endpoints of a tenant that point to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from sqlalchemy import update

from gateway.kit.context import Context
from gateway.kit.database import Database
from gateway.models import WebhookDelivery, WebhookEndpoint
from gateway.settings import Settings
from gateway.webhooks import service
from gateway.webhooks.delivery import deliver
from gateway.webhooks.events import EventType

TIMEOUT = 20.0
IMPATIENT = 0.5


@dataclass(frozen=True)
class Received:
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]


Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def status(code: int, **headers: str) -> Answer:
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {code} X\r\n{lines}content-length: 0\r\n\r\n".encode())

    return answer


async def hang(writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def hang_in_body(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\nhalf of")
    await asyncio.Event().wait()


async def reset(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()


async def nonsense(writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0-OpenSSH_9.9\r\n\r\n")


async def endless(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    while not writer.is_closing():
        writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        await writer.drain()


async def endless_headers(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while not writer.is_closing():
        writer.write(b"x-more: " + b"x" * 4096 + b"\r\n")
        await writer.drain()


async def drip(writer: asyncio.StreamWriter) -> None:
    for byte in b"HTTP/1.1 200 OK\r\nx-slow: " + b"x" * 1000:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.02)


@dataclass
class Receiver:
    """`answers` by path; what has none gets 200."""

    answers: dict[str, Answer] = field(default_factory=dict)
    received: list[Received] = field(default_factory=list)
    port: int = 0
    scheme: str = "http"
    host: str = "127.0.0.1"

    def url(self, path: str = "/ok") -> str:
        return f"{self.scheme}://{self.host}:{self.port}{path}"

    def at(self, path: str) -> list[Received]:
        return [each for each in self.received if each.path == path]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            path = head[0].split()[1]
            raw = {line.split(": ", 1)[0].lower(): line.split(": ", 1)[1] for line in head[1:-2]}
            body = await reader.readexactly(int(headers["content-length"]))
            self.received.append(Received(path, raw, body))
            await self.answers.get(path, status(200))(writer)
            await writer.drain()
        writer.close()


@pytest.fixture
async def serve_receiver() -> AsyncIterator[Callable[..., Awaitable[Receiver]]]:
    tasks: set[asyncio.Task[None]] = set()
    servers: list[asyncio.Server] = []

    async def serve(**options: Any) -> Receiver:
        receiver = Receiver()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(receiver.serve(reader, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        server = await asyncio.start_server(accept, "127.0.0.1", 0, **options)
        servers.append(server)
        receiver.port = server.sockets[0].getsockname()[1]
        return receiver

    yield serve
    for server in servers:
        server.close()
    for task in list(tasks):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for server in servers:
        await server.wait_closed()


@pytest.fixture
async def receiver(serve_receiver: Callable[..., Awaitable[Receiver]]) -> Receiver:
    return await serve_receiver()


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(
        update={"webhook_allow_private": True, "webhook_timeout_seconds": TIMEOUT}
    )


@contextmanager
def impatience(context: Context) -> Iterator[None]:
    """For receivers that never answer: of others a busy machine asks more time."""
    values = context.settings.__dict__
    values["webhook_timeout_seconds"] = IMPATIENT
    yield
    values["webhook_timeout_seconds"] = TIMEOUT


@dataclass
class Hooks:
    """One tenant's webhooks: its calls, its events, and time that passes at will."""

    client: httpx.AsyncClient
    context: Context
    tenant_id: str

    @property
    def database(self) -> Database:
        return self.context.database

    async def add(self, url: str, **wanted: Any) -> dict[str, Any]:
        answer = await self.client.post("/v1/webhook_endpoints", json={"url": url, **wanted})
        assert answer.status_code == 200, answer.text
        made: dict[str, Any] = answer.json()
        return made

    async def get(self, endpoint_id: str) -> dict[str, Any]:
        shown: dict[str, Any] = (
            await self.client.get(f"/v1/webhook_endpoints/{endpoint_id}")
        ).json()
        return shown

    async def tell(self, type: EventType = "batch.completed", id: str = "batch_1") -> str:
        """Returns the event's id."""
        async with self.database.write() as session:
            await service.record(session, self.tenant_id, type, {"id": id})
        [event] = (await self.client.get("/v1/webhook_events?limit=1")).json()["data"]
        return str(event["id"])

    async def deliver(self) -> int:
        return await deliver(self.context)

    async def deliveries(self, event_id: str) -> list[dict[str, Any]]:
        answer = await self.client.get(f"/v1/webhook_events/{event_id}/deliveries")
        assert answer.status_code == 200, answer.text
        found: list[dict[str, Any]] = answer.json()["data"]
        return found

    async def delivery(self, event_id: str) -> dict[str, Any]:
        [found] = await self.deliveries(event_id)
        return found

    async def time_passes(self) -> None:
        """Until everything pending is due, and no endpoint is paused."""
        async with self.database.write() as session:
            await session.execute(update(WebhookDelivery).values(next_attempt_at=0))
            await session.execute(update(WebhookEndpoint).values(paused_until=None))


@pytest.fixture
def hooks(client: httpx.AsyncClient, context: Context, tenant: Any) -> Hooks:
    return Hooks(client, context, tenant.tenant_id)


async def until(holds: Callable[[], bool], bound: float = 20.0) -> None:
    async with asyncio.timeout(bound):
        while not holds():  # noqa: ASYNC110  another task is waited for
            await asyncio.sleep(0.005)


def data_id(received: Received) -> str:
    return str(json.loads(received.body)["data"]["id"])
