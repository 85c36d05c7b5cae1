"""Answers on their way to the queue: in order, many at once, kept until it takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from worker.protocol.messages import GenerationEvent, TerminalEvent
from worker.queue.base import QueueUnavailable, RequestQueue
from worker.runtime.backoff import Backoff
from worker.runtime.held import Held

_log = structlog.get_logger(__name__)

MOST_AT_ONCE = 200

Item = tuple[Held, GenerationEvent]


class Outbox:
    """Delivers events. What comes while a call is under way goes together in the next one.

    `on_settled(held, kept)` is called once a terminal event was taken, or (kept False) as soon as
    the queue says that the lease is no longer ours: then the rest of its events is dropped. What
    the queue refuses for now is tried again until it is taken. What is waiting is bounded by the
    leases held: nothing new is claimed while the queue is away.
    """

    def __init__(self, queue: RequestQueue, on_settled: Callable[[Held, bool], None]) -> None:
        self._queue = queue
        self._on_settled = on_settled
        self._items: asyncio.Queue[Item] = asyncio.Queue()

    def put(self, held: Held, event: GenerationEvent) -> None:
        self._items.put_nowait((held, event))

    async def run(self) -> None:
        while True:
            items = [await self._items.get()]
            while len(items) < MOST_AT_ONCE and not self._items.empty():
                items.append(self._items.get_nowait())
            await self._send(items)
            for _ in items:
                self._items.task_done()

    async def flush(self, timeout: float) -> bool:
        """Wait until everything put so far was taken or dropped."""
        try:
            await asyncio.wait_for(self._items.join(), timeout)
        except TimeoutError:
            return False
        return True

    @property
    def waiting(self) -> int:
        return self._items.qsize()

    async def _send(self, items: list[Item]) -> None:
        backoff = Backoff()
        while items := [item for item in items if not item[0].lost]:
            try:
                taken = await self._queue.deliver([(held.lease, event) for held, event in items])
            except QueueUnavailable as error:
                if backoff.failures == 0:
                    waiting = self.waiting + len(items)
                    _log.warning("delivery_delayed", error=str(error), waiting=waiting)
                await asyncio.sleep(backoff.next())
                continue
            for (held, event), kept in zip(items, taken, strict=True):
                if not held.lost and (not kept or isinstance(event, TerminalEvent)):
                    self._on_settled(held, kept)
            return
