"""Tokens on their way to waiting clients: a Redis Stream for each request, and one connection
that tells when one of them has grown.

    emit: XADD, PUBLISH ──▶ Channels ──hint──▶ reader ──XREAD, many readers in one──▶ entries

A reader holds nothing but its place: what a slow client has not read stays in Redis.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from redis.asyncio import Redis

from worker.protocol.codec import CodecError, decode_event
from worker.protocol.messages import GenerationEvent
from worker.protocol.types import RequestId
from worker.queue.base import StreamEntry, TokenReader
from worker.queue.channels import Channels
from worker.queue.coalesced import Coalesced
from worker.queue.connection import address, reaching
from worker.queue.lua import prefix

ENTRIES_AT_ONCE = 64
_READERS_AT_ONCE = 100


class _Place(NamedTuple):
    stream: str
    after: str


_Reads = Coalesced[_Place, list[StreamEntry]]


class RedisTokenStream:
    """A TokenStream; `RedisQueue.emit` and `finish` write it. `channels` may be shared."""

    def __init__(self, client: Redis, model: str, channels: Channels) -> None:
        self._client = client
        self._prefix = prefix(model)
        self._channels = channels
        self._reads = _Reads(self._read, _READERS_AT_ONCE)

    def follow(self, request_id: RequestId) -> AbstractContextManager[TokenReader]:
        return self._follow(f"{self._prefix}:tokens:{request_id}")

    @contextmanager
    def _follow(self, stream: str) -> Iterator[TokenReader]:
        reader = _Reader(self._reads, stream)
        with self._channels.listen(stream, reader.hint):
            yield reader

    async def _read(self, places: Sequence[_Place]) -> dict[_Place, list[StreamEntry]]:
        found: dict[_Place, list[StreamEntry]] = {}
        while places:
            asked = {place.stream: place for place in places}
            with reaching(address(self._client)):
                reply: Any = await self._client.xread(dict(asked.values()), count=ENTRIES_AT_ONCE)
            for stream, entries in reply or ():
                found[asked[stream.decode()]] = [
                    StreamEntry(entry_id.decode(), _legible(fields)) for entry_id, fields in entries
                ]
            places = [place for place in places if asked[place.stream] != place]
        return found


class _Reader:
    """A TokenReader: looks when it is told to, and when its time is over."""

    def __init__(self, reads: _Reads, stream: str) -> None:
        self._reads = reads
        self._place = _Place(stream, "0")
        self._hinted = asyncio.Event()
        self._hinted.set()

    def hint(self, _: bytes | None) -> None:
        self._hinted.set()

    async def read(self, timeout: float) -> list[StreamEntry]:
        deadline = time.monotonic() + timeout
        while True:
            hinted = await self._until_hinted(deadline - time.monotonic())
            entries = await self._look()
            if entries or not hinted:
                return entries

    async def _until_hinted(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._hinted.wait()
        except TimeoutError:
            pass
        return self._hinted.is_set()

    async def _look(self) -> list[StreamEntry]:
        self._hinted.clear()
        try:
            entries = await self._reads.get(self._place) or []
        except BaseException:
            self._hinted.set()
            raise
        if entries:
            self._place = self._place._replace(after=entries[-1].entry_id)
        if len(entries) == ENTRIES_AT_ONCE:
            self._hinted.set()
        return entries


def _legible(fields: dict[bytes, bytes]) -> GenerationEvent | None:
    try:
        return decode_event(fields.get(b"event", b""))
    except CodecError:
        return None
