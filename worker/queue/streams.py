"""Events on their way from workers to collectors, as a Redis Stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from worker.protocol.codec import CodecError, decode_event
from worker.protocol.messages import GenerationEvent
from worker.queue.base import StreamEntry
from worker.queue.connection import SOCKET_TIMEOUT, address, reaching
from worker.queue.lua import Scripts, prefix
from worker.queue.settings import QueueSettings

_LONGEST_BLOCK = SOCKET_TIMEOUT / 2

Entries = list[tuple[bytes, dict[bytes, bytes]]]


class RedisEventStream:
    """An EventStream read by consumer group `group`. Acknowledging deletes, so the stream's
    length is what is pending. Entries unacknowledged for `reclaim_seconds` are read again by
    whoever asks next, their first reader included; readers silent for so long are forgotten."""

    def __init__(
        self,
        client: Redis,
        model: str,
        group: str = "collector",
        settings: QueueSettings | None = None,
    ) -> None:
        self._client = client
        self._settings = settings or QueueSettings()
        self._group = group
        self._scripts = Scripts(client, prefix(model))
        self._stream = f"{prefix(model)}:events"
        self._dead = f"{prefix(model)}:dead"
        self._address = address(client)
        self._own: dict[str, str] = {}
        self._scanned_at: dict[str, float] = {}

    async def read(self, consumer: str, count: int, timeout: float) -> list[StreamEntry]:
        with reaching(self._address):
            for find in (self._read_own, self._read_reclaimed):
                if entries := await self._grouped(find, consumer, count, 0.0):
                    return await self._decode(entries)
            deadline = time.monotonic() + timeout
            while True:
                left = max(0.0, deadline - time.monotonic())
                entries = await self._grouped(self._read_new, consumer, count, left)
                if entries or left <= _LONGEST_BLOCK:
                    return await self._decode(entries)

    async def ack(self, entry_ids: Sequence[str]) -> None:
        if not entry_ids:
            return
        with reaching(self._address):
            pipeline = self._client.pipeline(transaction=True)
            pipeline.xack(self._stream, self._group, *entry_ids)
            pipeline.xdel(self._stream, *entry_ids)
            try:
                await pipeline.execute()
            except ResponseError as error:
                if "NOGROUP" not in str(error):
                    raise

    async def pending(self) -> int:
        with reaching(self._address):
            return int(await self._client.xlen(self._stream))

    async def _grouped(self, find: Any, consumer: str, count: int, timeout: float) -> Entries:
        """Run `find`; make the group, from the stream's start, whenever the server has lost it:
        perhaps twice, as `find` waits for long and is repeated where a connection broke."""
        while True:
            try:
                return await find(consumer, count, timeout)  # type: ignore[no-any-return]
            except ResponseError as error:
                if "NOGROUP" not in str(error) and "UNBLOCKED" not in str(error):
                    raise
            await self._create_group()
            self._own.pop(consumer, None)

    async def _create_group(self) -> None:
        try:
            await self._client.xgroup_create(self._stream, self._group, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    async def _read_own(self, consumer: str, count: int, timeout: float) -> Entries:
        while (start := self._own.get(consumer, "0")) != "done":
            reply: Any = await self._client.xreadgroup(
                self._group, consumer, {self._stream: start}, count=count
            )
            found = reply[0][1] if reply else []
            self._own[consumer] = found[-1][0].decode() if found else "done"
            if entries := _present(found):
                return entries
        return []

    async def _read_reclaimed(self, consumer: str, count: int, timeout: float) -> Entries:
        idle = self._settings.reclaim_seconds
        if time.monotonic() - self._scanned_at.get(consumer, float("-inf")) < idle / 4:
            return []
        reply = await self._client.xautoclaim(
            self._stream, self._group, consumer, int(idle * 1000), count=count
        )
        entries = _present(reply[1])
        if not entries:
            await self._scripts.run("retire_readers", {"group": self._group, "seconds": idle})
            self._scanned_at[consumer] = time.monotonic()
        return entries

    async def _read_new(self, consumer: str, count: int, timeout: float) -> Entries:
        block = int(min(timeout, _LONGEST_BLOCK) * 1000)
        reply = await self._client.xreadgroup(
            self._group, consumer, {self._stream: ">"}, count=count, block=block or None
        )
        return _entries(reply)

    async def _decode(self, entries: Entries) -> list[StreamEntry]:
        return [
            StreamEntry(entry_id.decode(), await self._event(fields))
            for entry_id, fields in entries
        ]

    async def _event(self, fields: dict[bytes, bytes]) -> GenerationEvent | None:
        data = fields.get(b"event", b"")
        try:
            return decode_event(data)
        except CodecError as error:
            letter: dict[Any, Any] = {
                "kind": "event",
                "request_id": "",
                "reason": str(error),
                "data": data,
            }
            await self._client.xadd(
                self._dead, letter, maxlen=self._settings.dead_letter_limit, approximate=True
            )
            return None


def _entries(reply: Any) -> Entries:
    return _present(reply[0][1]) if reply else []


def _present(entries: Any) -> Entries:
    """Redis 6.2 answers nil for entries that are pending but were deleted."""
    return [(entry_id, fields) for entry_id, fields in filter(None, entries) if entry_id and fields]
