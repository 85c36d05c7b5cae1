"""Completion hints between processes, over one Redis channel."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import msgspec
from redis.asyncio import Redis

from worker.protocol.types import RequestId
from worker.queue.base import Waiter
from worker.queue.channels import Channels
from worker.queue.connection import address, reaching
from worker.queue.waiter import EventWaiter

_CHANNEL = "batten:bell"

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list[RequestId]).decode


class RedisCompletionBell:
    """A CompletionBell. `channels` may be shared.

    Without Redis, `listen` still works and `wait` ends by its timeout: SQL has the truth. When a
    lost subscription is made again, everybody is rung.
    """

    def __init__(self, client: Redis, channels: Channels) -> None:
        self._client = client
        self._channels = channels
        self._waiters: defaultdict[RequestId, set[EventWaiter]] = defaultdict(set)
        self._tried = asyncio.Event()
        self._listening = False

    async def ring(self, request_ids: Sequence[RequestId]) -> None:
        """Raises QueueUnavailable."""
        if request_ids:
            with reaching(address(self._client)):
                await self._client.publish(_CHANNEL, _pack(request_ids))

    def listen(self, request_id: RequestId) -> AbstractAsyncContextManager[Waiter]:
        return self._listen(request_id)

    @asynccontextmanager
    async def _listen(self, request_id: RequestId) -> AsyncIterator[Waiter]:
        waiter = EventWaiter()
        self._waiters[request_id].add(waiter)
        try:
            if not self._listening:
                self._listening = True
                self._channels.add(_CHANNEL, self._told)
            await self._tried.wait()
            yield waiter
        finally:
            self._waiters[request_id].discard(waiter)
            if not self._waiters[request_id]:
                del self._waiters[request_id]

    def _told(self, message: bytes | None) -> None:
        if message is not None:
            self._ring(_unpack(message))
        elif self._tried.is_set():
            self._ring(list(self._waiters))
        self._tried.set()

    def _ring(self, request_ids: Iterable[RequestId]) -> None:
        for request_id in request_ids:
            for waiter in self._waiters.get(request_id, ()):
                waiter.rung.set()
