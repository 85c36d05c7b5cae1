"""From start to the end of one worker: serve, drain, stop."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from dataclasses import dataclass, field
from typing import Any

import structlog

from worker.queue.base import QueueUnavailable, SharedPrefixes, WorkerDirectory
from worker.queue.cancelling import end
from worker.runtime import loops, stats
from worker.runtime.loops import Rhythm
from worker.runtime.worker import Worker

_log = structlog.get_logger(__name__)

FLUSH_SECONDS = 5.0
THREAD_SECONDS = 2.0


@dataclass(slots=True)
class StopSwitch:
    """`drain`: take nothing new, finish what runs. `now`: give back what runs, and end."""

    drain: asyncio.Event = field(default_factory=asyncio.Event)
    now: asyncio.Event = field(default_factory=asyncio.Event)

    def press(self) -> None:
        """The first time drains, the second stops."""
        if self.drain.is_set():
            self.now.set()
        self.drain.set()


async def serve(
    worker: Worker,
    directory: WorkerDirectory,
    prefixes: SharedPrefixes,
    stop: StopSwitch,
    *,
    rhythm: Rhythm,
    drain_seconds: float,
) -> bool:
    """Run until stopped (True) or until the engine crashed (False)."""
    worker.thread.start()
    claims = asyncio.create_task(loops.claim(worker, rhythm, stop.drain), name="claim")
    standing = [
        asyncio.create_task(work, name=name)
        for name, work in _activities(worker, directory, prefixes, rhythm).items()
    ]
    waiters = [asyncio.create_task(stop.drain.wait()), asyncio.create_task(worker.crashed.wait())]
    try:
        await _first([claims, *standing], waiters)
        if not worker.crashed.is_set():
            drain = asyncio.create_task(_drain(worker, claims, stop, drain_seconds))
            await _first(standing, [drain])
        await worker.outbox.flush(FLUSH_SECONDS)
        await _retire(worker, directory)
    finally:
        await end(claims, *standing, *waiters)
        stopped = await worker.thread.stop(THREAD_SECONDS)
    _log.info("worker_stopped", abandoned=len(worker.held), engine_idle=stopped)
    return not worker.crashed.is_set()


def _activities(
    worker: Worker, directory: WorkerDirectory, prefixes: SharedPrefixes, rhythm: Rhythm
) -> dict[str, Coroutine[Any, Any, None]]:
    return {
        "outbox": worker.outbox.run(),
        "renew": loops.renew(worker, rhythm),
        "arrivals": loops.arrivals(worker, rhythm),
        "cancel": loops.cancel(worker, rhythm),
        "announce": loops.announce(worker, rhythm, directory),
        "share": loops.share(worker, rhythm, prefixes),
        "stats": stats.report(worker),
    }


async def _drain(
    worker: Worker, claims: asyncio.Task[None], stop: StopSwitch, seconds: float
) -> None:
    """Finish what runs within `seconds`; give back what has not begun, and then the rest."""
    _log.info("draining", held=len(worker.held), seconds=seconds)
    urgent: list[asyncio.Task[Any]] = [
        asyncio.create_task(event.wait()) for event in (stop.now, worker.crashed)
    ]
    await asyncio.wait([claims, *urgent], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    await worker.give_back(held for held in worker.held if not held.started)
    ends = [asyncio.create_task(worker.until_idle()), *urgent]
    await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in ends:
        task.cancel()
    if not worker.crashed.is_set():
        await worker.give_back(worker.held)


async def _retire(worker: Worker, directory: WorkerDirectory) -> None:
    try:
        await directory.retire(worker.name)
    except QueueUnavailable as error:
        _log.warning("not_retired", error=str(error))


async def _first(
    working: Collection[asyncio.Task[None]], until: Collection[asyncio.Task[Any]]
) -> None:
    """Wait for one of `until`; raises what a task that should go on working raised."""
    tasks = {*working, *until}
    while not any(task.done() for task in until):
        done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    for task in until:
        if task.done():
            task.result()
