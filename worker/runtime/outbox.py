"""Answers on their way to the queue: in order for each request, kept until it takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from zlib import crc32

import structlog

from worker.protocol.messages import Cancelled, Failed, Finished, GenerationEvent
from worker.queue.base import QueueUnavailable, RequestQueue
from worker.runtime.backoff import Backoff
from worker.runtime.held import Held

_log = structlog.get_logger(__name__)

LANES = 4

Item = tuple[Held, GenerationEvent]


class Outbox:
    """Delivers events; several lanes at once, each request in one of them.

    `on_settled(held, kept)` is called once a terminal event was taken, or (kept False) as soon as
    the queue says that the lease is no longer ours: then the rest of its events is dropped. What
    the queue refuses for now is tried again until it is taken. What is waiting is bounded by the
    leases held: nothing new is claimed while the queue is away.
    """

    def __init__(self, queue: RequestQueue, on_settled: Callable[[Held, bool], None]) -> None:
        self._queue = queue
        self._on_settled = on_settled
        self._lanes: tuple[asyncio.Queue[Item], ...] = tuple(asyncio.Queue() for _ in range(LANES))

    def put(self, held: Held, event: GenerationEvent) -> None:
        lane = crc32(held.request_id.encode()) % LANES
        self._lanes[lane].put_nowait((held, event))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for lane in self._lanes:
                group.create_task(self._deliver(lane))

    async def flush(self, timeout: float) -> bool:
        """Wait until everything put so far was taken or dropped."""
        waits = [asyncio.create_task(lane.join()) for lane in self._lanes]
        _, late = await asyncio.wait(waits, timeout=timeout)
        for task in late:
            task.cancel()
        return not late

    @property
    def waiting(self) -> int:
        return sum(lane.qsize() for lane in self._lanes)

    async def _deliver(self, lane: asyncio.Queue[Item]) -> None:
        while True:
            held, event = await lane.get()
            if not held.lost:
                await self._send(held, event)
            lane.task_done()

    async def _send(self, held: Held, event: GenerationEvent) -> None:
        backoff = Backoff()
        while not held.lost:
            try:
                kept = await self._offer(held, event)
            except QueueUnavailable as error:
                if backoff.failures == 0:
                    _log.warning("delivery_delayed", error=str(error), waiting=self.waiting + 1)
                await asyncio.sleep(backoff.next())
                continue
            if not kept or isinstance(event, Finished | Failed | Cancelled):
                self._on_settled(held, kept)
            return

    async def _offer(self, held: Held, event: GenerationEvent) -> bool:
        if isinstance(event, Finished | Failed | Cancelled):
            return await self._queue.finish(held.lease, event)
        return await self._queue.emit(held.lease, event)
