"""The worker's standing activities. Each waits on its own and survives Redis being away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from worker.queue.base import QueueUnavailable, SharedPrefixes, WorkerDirectory, WorkerInfo
from worker.runtime.backoff import Backoff
from worker.runtime.engine_thread import EngineStopped
from worker.runtime.worker import Worker

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """Seconds between things. A worker asks for work when it is told that there is some, or that
    it has room, and every `claim_idle`; never sooner than `claim_least` after it began to ask."""

    claim_idle: float = 0.25
    claim_least: float = 0.005
    notice_wait: float = 5.0
    announce: float = 3.0
    lease: float = 60.0

    @property
    def renew(self) -> float:
        return self.lease / 3


async def claim(worker: Worker, rhythm: Rhythm, draining: asyncio.Event) -> None:
    """Ask for as much as fits, until the drain begins."""

    async def once() -> bool:
        worker.room.clear()
        capacity = worker.capacity()
        leases = await worker.queue.claim(worker.name, capacity) if capacity.requests else []
        if draining.is_set():  # it began while the question was on its way
            await worker.give_back([worker.held.add(lease) for lease in leases])
        elif leases:
            await worker.admit(leases)
        return bool(leases)

    backoff = Backoff(most=2.0)
    while not draining.is_set():
        next_at = time.monotonic() + rhythm.claim_least
        try:
            claimed = await _unless_away("claim", once, backoff)
        except EngineStopped:
            return
        if not claimed:
            await _wait(worker.room, rhythm.claim_idle)
        await asyncio.sleep(max(0.0, next_at - time.monotonic()))


async def arrivals(worker: Worker, rhythm: Rhythm) -> None:
    """Wake the claims when something has become ready."""

    async def once() -> bool:
        if await worker.queue.arrivals(rhythm.notice_wait):
            worker.room.set()
        return True

    backoff = Backoff()
    while True:
        await _unless_away("arrivals", once, backoff)


async def renew(worker: Worker, rhythm: Rhythm) -> None:
    """Keep leases only while the engine steps: one that hangs in a step must lose its work."""

    async def once() -> bool:
        renewal = await worker.queue.renew(worker.name, [held.lease for held in worker.held])
        for held in worker.held.of(renewal.lost):
            worker.lose(held)
        worker.cancel(renewal.cancelled)
        return True

    backoff = Backoff(most=rhythm.renew / 2)
    while True:
        await asyncio.sleep(rhythm.renew)
        if (seconds := worker.thread.step_seconds) >= rhythm.renew:
            _log.error("engine_stalled", seconds=round(seconds, 1), held=len(worker.held))
        elif len(worker.held):
            while not await _unless_away("renew", once, backoff):
                continue


async def cancel(worker: Worker, rhythm: Rhythm) -> None:
    async def once() -> bool:
        worker.cancel(await worker.queue.cancellations(rhythm.notice_wait))
        return True

    backoff = Backoff()
    while True:
        await _unless_away("cancellations", once, backoff)


async def announce(worker: Worker, rhythm: Rhythm, directory: WorkerDirectory) -> None:
    async def once() -> bool:
        info = WorkerInfo(
            worker.name, worker.queue.model, worker.limits, worker.capacity(), time.time()
        )
        await directory.announce(info)
        return True

    backoff = Backoff(most=rhythm.announce)
    while True:
        if await _unless_away("announce", once, backoff):
            await asyncio.sleep(rhythm.announce)


async def share(worker: Worker, rhythm: Rhythm, prefixes: SharedPrefixes) -> None:
    """Keep the KV of what the operator shares among tenants."""
    known = ""

    async def once() -> bool:
        nonlocal known
        published = await prefixes.read(known)
        if published is not None:
            kept = await worker.thread.call(lambda engine: engine.share(published.prefixes))
            _log.info("prefixes_shared", prefixes=len(published.prefixes), blocks=kept)
            known = published.version
        return True

    backoff = Backoff(most=rhythm.announce)
    while True:
        try:
            await _unless_away("share", once, backoff)
        except EngineStopped:
            return
        await asyncio.sleep(rhythm.announce)


async def _unless_away(what: str, action: Callable[[], Awaitable[bool]], backoff: Backoff) -> bool:
    """The action's answer; False, after a pause, while Redis is away (said once an outage)."""
    try:
        done = await action()
    except QueueUnavailable as error:
        if backoff.failures == 0:
            _log.warning("redis_unavailable", during=what, error=str(error))
        await asyncio.sleep(backoff.next())
        return False
    if backoff.failures:
        _log.info("redis_back", during=what)
        backoff.reset()
    return done


async def _wait(event: asyncio.Event, timeout: float) -> None:
    try:
        async with asyncio.timeout(timeout):
            await event.wait()
    except TimeoutError:
        return
