"""A worker over a null engine, and a queue of each kind in turn."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from redis.asyncio import Redis

from worker.engine.batch import SampledToken, ScheduledBatch
from worker.engine.config import SchedulerConfig
from worker.engine.engine import Engine
from worker.engine.null_runner import NullResidency, NullRunner
from worker.protocol.messages import GenerateRequest, GenerationEvent
from worker.protocol.types import RequestId, SamplingParams, TenantId
from worker.queue.base import EventStream, RequestQueue, SharedPrefixes, WorkerDirectory
from worker.queue.memory import (
    MemoryEventStream,
    MemoryQueue,
    MemoryServer,
    MemorySharedPrefixes,
    MemoryWorkerDirectory,
)
from worker.queue.redis import (
    RedisEventStream,
    RedisQueue,
    RedisSharedPrefixes,
    RedisWorkerDirectory,
    connect,
)
from worker.queue.settings import QueueSettings
from worker.runtime.lifecycle import StopSwitch, serve
from worker.runtime.loops import Rhythm
from worker.runtime.worker import Worker

BOUND = 20.0
_models = count(1)


class Letters:
    """A tokenizer whose token i is one letter."""

    def decode(self, ids: object, skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + token % 26) for token in ids)  # type: ignore[attr-defined]

    def token_to_id(self, token: str) -> int | None:
        return ord(token) - 97 if len(token) == 1 and "a" <= token <= "z" else None


class GatedRunner:
    """A NullRunner whose steps wait for the gate, and raise what `failure` says."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.failure: Callable[[ScheduledBatch], Exception | None] = lambda batch: None
        self._inner = NullRunner(26)

    def pause(self, seconds: float) -> None:
        """For `failure`: each step takes this long."""
        time.sleep(seconds)

    def execute(self, batch: ScheduledBatch) -> list[SampledToken]:
        self.entered.set()
        assert self.gate.wait(BOUND)
        if error := self.failure(batch):
            raise error
        return self._inner.execute(batch)


@dataclass
class Bench:
    """Everything a test holds: the queue's ports and a way to run workers on them."""

    queue: RequestQueue
    events: EventStream
    directory: WorkerDirectory
    prefixes: SharedPrefixes
    settings: QueueSettings
    runner: GatedRunner = field(default_factory=GatedRunner)
    stop: StopSwitch = field(default_factory=StopSwitch)
    seen: list[GenerationEvent] = field(default_factory=list)
    drain_seconds: float = 5.0

    def engine(self, **config: float) -> Engine:
        options = {"num_blocks": 1024, "context_tokens": 1024, **config}
        return Engine(
            SchedulerConfig(**options), self.runner, NullResidency(64), Letters(), frozenset(), "r"
        )

    def worker(self, name: str = "w1", **config: float) -> Worker:
        return Worker(name, self.engine(**config), self.queue)

    @asynccontextmanager
    async def running(
        self, worker: Worker, rhythm: Rhythm | None = None
    ) -> AsyncIterator[asyncio.Task[bool]]:
        """`worker` at work; stopped and checked for unexpected errors at the end."""
        rhythm = rhythm or Rhythm(
            claim_idle=0.01,
            notice_wait=0.2,
            announce=0.3,
            lease=self.settings.lease_seconds,
        )
        task = asyncio.create_task(
            serve(
                worker,
                self.directory,
                self.prefixes,
                self.stop,
                rhythm=rhythm,
                drain_seconds=self.drain_seconds,
            )
        )
        try:
            yield task
        finally:
            self.runner.gate.set()
            self.stop.press()
            self.stop.press()
            await asyncio.wait_for(task, BOUND)

    async def submit(self, *requests: GenerateRequest) -> None:
        assert await self.queue.enqueue(requests) == ["enqueued"] * len(requests)

    async def expect(self, *kinds: type, of: str | None = None) -> list[GenerationEvent]:
        """Read events until one of each kind has come for request `of`; returns these."""
        async with asyncio.timeout(BOUND):
            while True:
                about = [e for e in self.seen if of in (None, e.request_id)]
                found = [next((e for e in about if isinstance(e, kind)), None) for kind in kinds]
                if all(found):
                    return [event for event in found if event]
                entries = await self.events.read("test", 100, 1.0)
                await self.events.ack([entry.entry_id for entry in entries])
                self.seen += [entry.event for entry in entries if entry.event]


@pytest.fixture
def until() -> Callable[[Callable[[], Any]], Awaitable[None]]:
    """Wait, bounded, for a condition of another thread or process; awaits it when it must."""

    async def wait(condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(BOUND):
            while True:
                answer = condition()
                if inspect.isawaitable(answer):
                    answer = await answer
                if answer:
                    return
                await asyncio.sleep(0.005)

    return wait


@pytest.fixture(params=["memory", "redis"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    settings = QueueSettings(lease_seconds=1.2)
    model = f"runtime-{next(_models)}"
    if request.param == "memory":
        server = MemoryServer()
        queue = MemoryQueue(server, model, settings)
        yield Bench(
            queue,
            MemoryEventStream(server, model),
            MemoryWorkerDirectory(server),
            MemorySharedPrefixes(server, model),
            settings,
        )
        await queue.close()
        return
    client: Redis = connect(request.getfixturevalue("redis_server_url"))
    await client.flushall()
    async with _redis_bench(client, model, settings) as bench:
        yield bench


@pytest.fixture
def redis_bench() -> Callable[..., AbstractAsyncContextManager[Bench]]:
    """A bench on a client of one's own."""
    return _redis_bench


@asynccontextmanager
async def _redis_bench(client: Redis, model: str, settings: QueueSettings) -> AsyncIterator[Bench]:
    queue = RedisQueue(client, model, settings)
    yield Bench(
        queue,
        RedisEventStream(client, model, settings=settings),
        RedisWorkerDirectory(client, settings),
        RedisSharedPrefixes(client, model),
        settings,
    )
    await queue.close()
    await client.aclose()


@pytest.fixture
def make_request() -> Callable[..., GenerateRequest]:
    def make(name: str = "r1", max_tokens: int = 4, **options: object) -> GenerateRequest:
        fields = {
            "request_id": RequestId(name),
            "attempt": 1,
            "epoch": "e",
            "tenant": TenantId("t1"),
            "model": "m",
            "prompt_ids": (1, 2, 3),
            "sampling": SamplingParams(max_tokens=max_tokens),
            **options,
        }
        return GenerateRequest(**fields)  # type: ignore[arg-type]

    return make
