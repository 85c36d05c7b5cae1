"""What is shared among tenants, from the gateway to the workers of a model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
from redis.asyncio import Redis

from worker.protocol.types import SharedPrefix
from worker.queue.base import Published
from worker.queue.connection import address, reaching
from worker.queue.lua import prefix

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(tuple[SharedPrefix, ...]).decode


class RedisSharedPrefixes:
    """A SharedPrefixes: one hash, read whole only when its version is a new one."""

    def __init__(self, client: Redis, model: str) -> None:
        self._client = client
        self._key = f"{prefix(model)}:prefixes"

    async def publish(self, prefixes: Sequence[SharedPrefix]) -> bool:
        new = published(prefixes)
        fields: dict[Any, Any] = {"version": new.version, "data": _pack(new.prefixes)}
        with reaching(address(self._client)):
            if await self._client.hget(self._key, "version") == new.version.encode():
                return False
            await self._client.hset(self._key, mapping=fields)
        return True

    async def read(self, known: str) -> Published | None:
        with reaching(address(self._client)):
            if await self._client.hget(self._key, "version") in {None, known.encode()}:
                return None
            reply: Any = await self._client.hmget(self._key, ["version", "data"])
        version, data = reply
        if version is None or data is None:
            return None
        return Published(version.decode(), _unpack(data))


def published(prefixes: Sequence[SharedPrefix]) -> Published:
    digest = hashlib.blake2b(_pack(tuple(prefixes)), digest_size=8)
    return Published(digest.hexdigest(), tuple(prefixes))
