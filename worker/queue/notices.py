"""Messages of one Redis channel, read by one process."""

from __future__ import annotations

import asyncio
import time

from redis.asyncio import Redis
from redis.asyncio.client import PubSub

from worker.queue.connection import SOCKET_TIMEOUT, address, reaching


class Notices:
    """A subscription made at first use, and made again whenever the connection was lost.

    What is published while it is down is missed: notices are hints.
    """

    def __init__(self, client: Redis, channel: str) -> None:
        self._client = client
        self._channel = channel
        self._pubsub: PubSub | None = None
        self._busy = asyncio.Lock()

    async def open(self) -> None:
        """Subscribe, and return once the server has confirmed. Raises QueueUnavailable."""
        async with self._busy:
            await self._open()

    async def wait(self, timeout: float) -> list[bytes]:
        """All messages at hand, or the first within `timeout` seconds. Raises QueueUnavailable."""
        deadline = time.monotonic() + timeout
        async with self._busy:
            pubsub = await self._open()
            messages: list[bytes] = []
            while True:
                left = 0.0 if messages else max(0.0, deadline - time.monotonic())
                with reaching(address(self._client)):
                    message = await pubsub.get_message(timeout=left)
                if message and message["type"] == "message":
                    messages.append(message["data"])
                elif message is None and (messages or left == 0.0):
                    return messages

    async def close(self) -> None:
        if self._pubsub is not None:
            pubsub, self._pubsub = self._pubsub, None
            await pubsub.aclose()  # type: ignore[no-untyped-call]

    async def _open(self) -> PubSub:
        if self._pubsub is None:
            pubsub = self._client.pubsub()
            try:
                with reaching(address(self._client)):
                    await pubsub.subscribe(self._channel)
                    await pubsub.get_message(timeout=SOCKET_TIMEOUT)
            except BaseException:
                await pubsub.aclose()  # type: ignore[no-untyped-call]
                raise
            self._pubsub = pubsub
        return self._pubsub
