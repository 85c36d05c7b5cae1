"""Is everything up? The API answers /healthz and each worker has announced itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

import httpx
from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.kit.queues import Queues
from worker.queue.base import QueueUnavailable

POLL_SECONDS = 0.1


async def poll(ready: Callable[[], Awaitable[bool]]) -> None:
    """Ask until the answer is yes; the caller sets the bound by cancelling."""
    while not await ready():  # noqa: ASYNC110 - the other side is another process
        await asyncio.sleep(POLL_SECONDS)


async def redis_answers(url: str) -> None:
    """Wait for PING to be answered: refused or still loading is not yet."""
    client = Redis.from_url(url, socket_connect_timeout=1.0, socket_timeout=1.0)

    async def ready() -> bool:
        try:
            return bool(await client.ping())
        except (RedisError, OSError):
            return False

    try:
        await poll(ready)
    finally:
        await client.aclose()


async def api_answers(base_url: str) -> None:
    async with httpx.AsyncClient(base_url=base_url, timeout=2.0, trust_env=False) as client:

        async def ready() -> bool:
            try:
                return (await client.get("/healthz")).status_code == 200
            except httpx.HTTPError:
                return False

        await poll(ready)


async def workers_announced(redis_url: str, labels: Collection[str]) -> None:
    """Wait until a worker of each label is known; labels are unique to one supervisor's life."""
    queues = Queues(redis_url)

    async def ready() -> bool:
        try:
            names = [info.worker for info in await queues.directory.workers()]
        except QueueUnavailable:
            return False
        return all(any(name.startswith(f"{label}-") for name in names) for label in labels)

    try:
        await poll(ready)
    finally:
        await queues.close()
