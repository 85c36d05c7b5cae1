"""Completion hints between processes, over one Redis channel."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import msgspec
import structlog
from redis.asyncio import Redis

from worker.protocol.types import RequestId
from worker.queue.base import QueueUnavailable, Waiter
from worker.queue.connection import address, reaching
from worker.queue.notices import Notices
from worker.queue.waiter import EventWaiter

_CHANNEL = "batten:bell"
_RETRY_SECONDS = 1.0
_READ_SECONDS = 5.0

_log = structlog.get_logger(__name__)
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list[RequestId]).decode


class RedisCompletionBell:
    """A CompletionBell. The subscription lives while anybody listens.

    Without Redis, `listen` still works and `wait` ends by its timeout: SQL has the truth.
    """

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._waiters: defaultdict[RequestId, set[EventWaiter]] = defaultdict(set)
        self._reader: asyncio.Task[None] | None = None
        self._subscribed = asyncio.Event()

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
            if self._reader is None:
                self._subscribed.clear()
                self._reader = asyncio.create_task(self._read(), name="completion-bell")
            await self._subscribed.wait()
            yield waiter
        finally:
            self._waiters[request_id].discard(waiter)
            if not self._waiters[request_id]:
                del self._waiters[request_id]
            await self._stop_if_unheard()

    async def _stop_if_unheard(self) -> None:
        if not self._waiters and self._reader is not None:
            reader, self._reader = self._reader, None
            reader.cancel()
            await asyncio.wait([reader])

    async def _read(self) -> None:
        notices = Notices(self._client, _CHANNEL)
        try:
            while True:
                try:
                    await notices.open()
                    self._subscribed.set()
                    for message in await notices.wait(_READ_SECONDS):
                        self._tell(_unpack(message))
                except QueueUnavailable as error:
                    self._subscribed.set()
                    _log.warning("completion_bell_unavailable", reason=str(error))
                    await asyncio.sleep(_RETRY_SECONDS)
        finally:
            await notices.close()

    def _tell(self, request_ids: Sequence[RequestId]) -> None:
        for request_id in request_ids:
            for waiter in self._waiters.get(request_id, ()):
                waiter.rung.set()
