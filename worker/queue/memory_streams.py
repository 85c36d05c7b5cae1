"""Event streams, worker directory and completion bell over a MemoryServer."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

import msgspec

from worker.protocol.codec import CodecError, decode_event
from worker.protocol.messages import GenerationEvent
from worker.protocol.types import RequestId, SharedPrefix
from worker.queue.base import (
    DeadLetter,
    Published,
    StreamEntry,
    TokenReader,
    Waiter,
    WorkerInfo,
)
from worker.queue.capacity import check_announced
from worker.queue.memory_log import Group
from worker.queue.memory_state import MemoryServer, ModelState
from worker.queue.prefixes import published
from worker.queue.settings import QueueSettings
from worker.queue.waiter import EventWaiter


class MemoryEventStream:
    """An EventStream read by consumer group `group`."""

    def __init__(
        self,
        server: MemoryServer,
        model: str,
        group: str = "collector",
        settings: QueueSettings | None = None,
    ) -> None:
        self._server = server
        self._model = model
        self._group_name = group
        self._settings = settings or QueueSettings()
        self._own: dict[str, int | None] = {}

    @property
    def _state(self) -> ModelState:
        return self._server.model(self._model)

    @property
    def _group(self) -> Group:
        return self._state.groups[self._group_name]

    async def read(self, consumer: str, count: int, timeout: float) -> list[StreamEntry]:
        deadline = time.monotonic() + timeout
        entries = self._unacknowledged(consumer, count) or self._reclaimed(consumer, count)
        while not entries:
            entries = self._new(consumer, count)
            left = deadline - time.monotonic()
            if entries or left <= 0:
                break
            await self._state.events.arrived.wait(left)
        return [StreamEntry(f"{entry}-0", self._event(entry)) for entry in entries]

    async def ack(self, entry_ids: Sequence[str]) -> None:
        for entry_id in entry_ids:
            entry = int(entry_id.partition("-")[0])
            self._group.pending.pop(entry, None)
            self._state.events.entries.pop(entry, None)

    async def pending(self) -> int:
        return len(self._state.events.entries)

    def _unacknowledged(self, consumer: str, count: int) -> list[int]:
        start = self._own.get(consumer, 0)
        if start is None:
            return []
        pending = sorted(self._group.pending.items())
        entries = [one for one, (owner, _) in pending if owner == consumer and one > start][:count]
        self._own[consumer] = entries[-1] if entries else None
        return entries

    def _reclaimed(self, consumer: str, count: int) -> list[int]:
        oldest = self._server.clock() - self._settings.reclaim_seconds
        idle = [one for one, (_, since) in sorted(self._group.pending.items()) if since <= oldest]
        return self._deliver(consumer, idle[:count])

    def _new(self, consumer: str, count: int) -> list[int]:
        entries = self._state.events.after(self._group.last, count)
        self._group.last = max([self._group.last, *entries])
        return self._deliver(consumer, entries)

    def _deliver(self, consumer: str, entries: list[int]) -> list[int]:
        for entry in entries:
            self._group.pending[entry] = (consumer, self._server.clock())
        return entries

    def _event(self, entry: int) -> GenerationEvent | None:
        data = self._state.events.entries[entry]
        try:
            return decode_event(data)
        except CodecError as error:
            letter_id = str(self._state.next_sequence())
            self._state.dead.append(DeadLetter(letter_id, "event", "", str(error), data))
            return None


class MemoryTokenStream:
    """A TokenStream; `MemoryQueue.emit` and `finish` write it."""

    def __init__(self, server: MemoryServer, model: str) -> None:
        self._server = server
        self._model = model

    @contextmanager
    def follow(self, request_id: RequestId) -> Iterator[TokenReader]:
        yield _Reader(self._server, self._model, request_id)


class _Reader:
    """A TokenReader."""

    def __init__(self, server: MemoryServer, model: str, request_id: RequestId) -> None:
        self._server = server
        self._model = model
        self._request_id = request_id
        self._after = 0

    async def read(self, timeout: float) -> list[StreamEntry]:
        logs = self._server.model(self._model).tokens
        deadline = time.monotonic() + timeout
        while True:
            entries = logs.after(self._request_id, self._after, self._server.clock())
            left = deadline - time.monotonic()
            if entries or left <= 0:
                self._after = max([self._after, *entries])
                return [StreamEntry(f"{one}-0", _legible(data)) for one, data in entries.items()]
            await logs.arrived.wait(left)


def _legible(data: bytes) -> GenerationEvent | None:
    try:
        return decode_event(data)
    except CodecError:
        return None


class MemoryWorkerDirectory:
    """A WorkerDirectory."""

    def __init__(self, server: MemoryServer, settings: QueueSettings | None = None) -> None:
        self._server = server
        self._settings = settings or QueueSettings()

    async def announce(self, info: WorkerInfo) -> None:
        check_announced(info)
        self._server.workers[info.worker] = (info, self._server.clock())

    async def retire(self, worker: str) -> None:
        self._server.workers.pop(worker, None)

    async def workers(self) -> list[WorkerInfo]:
        oldest = self._server.clock() - self._settings.worker_seconds
        live = {name: one for name, one in self._server.workers.items() if one[1] >= oldest}
        self._server.workers = live
        return [msgspec.structs.replace(info, seen_at=seen_at) for info, seen_at in live.values()]


class MemorySharedPrefixes:
    """A SharedPrefixes."""

    def __init__(self, server: MemoryServer, model: str) -> None:
        self._server = server
        self._model = model

    async def publish(self, prefixes: Sequence[SharedPrefix]) -> bool:
        new = published(prefixes)
        old = self._server.prefixes.get(self._model)
        self._server.prefixes[self._model] = new
        return old != new

    async def read(self, known: str) -> Published | None:
        found = self._server.prefixes.get(self._model)
        return None if found is None or found.version == known else found


class MemoryCompletionBell:
    """A CompletionBell."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server

    async def ring(self, request_ids: Sequence[RequestId]) -> None:
        for request_id in request_ids:
            for waiter in self._server.listeners.get(request_id, ()):
                waiter.rung.set()

    def listen(self, request_id: RequestId) -> AbstractAsyncContextManager[Waiter]:
        return self._listen(request_id)

    @asynccontextmanager
    async def _listen(self, request_id: RequestId) -> AsyncIterator[Waiter]:
        waiter = EventWaiter()
        listeners = self._server.listeners
        listeners[request_id].add(waiter)
        try:
            yield waiter
        finally:
            listeners[request_id].discard(waiter)
            if not listeners[request_id]:
                del listeners[request_id]
