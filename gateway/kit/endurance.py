"""Loops that outlive outages of Redis and of the database."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog
from obstore.exceptions import BaseError as StoreError
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from worker.queue.base import QueueUnavailable

OUTAGES = (
    QueueUnavailable,
    OperationalError,
    InterfaceError,
    PoolTimeout,
    StoreError,
    ConnectionError,
)
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0

_log = structlog.get_logger(__name__)


async def pause(stop: asyncio.Event, seconds: float) -> None:
    """Sleep, or return at once when `stop` is set."""
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except TimeoutError:
        return


async def endure(
    name: str,
    stop: asyncio.Event,
    step: Callable[[], Awaitable[object]],
    every: float = 0.0,
    longest: float | None = None,
) -> None:
    """Repeats `step` until `stop`; an outage is logged once and waited out with growing pauses. A
    step that takes longer than `longest` seconds is broken off: it must bear that at any point.

    Any other error is raised, and sets `stop`, so that the loops beside this one end too: that
    somebody cancels them is not enough, as Python 3.11's `wait_for`, under every command to Redis,
    may lose a cancellation."""
    backoff = 0.0
    while not stop.is_set():
        try:
            async with asyncio.timeout(longest):
                await step()
        except (*OUTAGES, TimeoutError) as error:
            if not backoff:
                _log.warning("outage", loop=name, error=f"{type(error).__name__}: {error}")
            backoff = min(_LONGEST_PAUSE, backoff * 2 or _FIRST_PAUSE)
            await pause(stop, backoff)
            continue
        except Exception as error:
            _log.error("loop_failed", loop=name, exc_info=error)
            stop.set()
            raise
        if backoff:
            _log.info("outage_over", loop=name)
            backoff = 0.0
        if every:
            await pause(stop, every)
