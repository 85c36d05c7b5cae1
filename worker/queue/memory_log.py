"""Streams in one process: the counterpart of a Redis Stream and its consumer groups."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from worker.protocol.types import RequestId
from worker.queue.settings import QueueSettings


class Signal:
    """Wakes everybody who waits at that moment."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Event] = set()

    def ring(self) -> None:
        for waiter in self._waiters:
            waiter.set()

    async def wait(self, timeout: float) -> bool:
        waiter = asyncio.Event()
        self._waiters.add(waiter)
        try:
            await asyncio.wait_for(waiter.wait(), timeout)
        except TimeoutError:
            return False
        finally:
            self._waiters.discard(waiter)
        return True


class Log:
    """A stream: entries by growing id."""

    def __init__(self) -> None:
        self.entries: dict[int, bytes] = {}
        self.arrived = Signal()
        self._last = 0

    def append(self, data: bytes) -> None:
        self._last += 1
        self.entries[self._last] = data
        self.arrived.ring()

    def after(self, entry: int, count: int | None = None) -> list[int]:
        return [one for one in self.entries if one > entry][:count]


@dataclass(slots=True)
class Group:
    """A consumer group: how far it has read, and what each consumer has not acknowledged."""

    last: int = 0
    pending: dict[int, tuple[str, float]] = field(default_factory=dict)


class TokenLogs:
    """One short-lived log for each streamed request, bounded as `QueueSettings` has it."""

    def __init__(self, settings: QueueSettings | None = None) -> None:
        self._settings = settings or QueueSettings()
        self._logs: dict[RequestId, Log] = {}
        self._written_at: dict[RequestId, float] = {}
        self.arrived = Signal()

    def append(self, request_id: RequestId, data: bytes, now: float) -> None:
        self._expire(now)
        # Last written is last in order, so that the oldest is found first.
        self._written_at.pop(request_id, None)
        self._written_at[request_id] = now
        log = self._logs.setdefault(request_id, Log())
        log.append(data)
        if len(log.entries) > self._settings.token_stream_limit:
            del log.entries[min(log.entries)]
        self.arrived.ring()

    def after(self, request_id: RequestId, entry: int, now: float) -> dict[int, bytes]:
        self._expire(now)
        log = self._logs.get(request_id)
        return {one: log.entries[one] for one in log.after(entry)} if log else {}

    def _expire(self, now: float) -> None:
        oldest = now - self._settings.token_stream_seconds
        gone = [one for one, written_at in self._written_at.items() if written_at <= oldest]
        for request_id in gone:
            del self._logs[request_id], self._written_at[request_id]
