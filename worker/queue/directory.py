"""Live workers of all models, in Redis."""

from __future__ import annotations

import msgspec
from redis.asyncio import Redis

from worker.queue.base import WorkerInfo
from worker.queue.capacity import check_announced
from worker.queue.lua import Scripts
from worker.queue.settings import QueueSettings

_PREFIX = "batten:{workers}"

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(WorkerInfo).decode


class RedisWorkerDirectory:
    """A WorkerDirectory; a worker that does not repeat itself is gone after `worker_seconds`."""

    def __init__(self, client: Redis, settings: QueueSettings | None = None) -> None:
        self._scripts = Scripts(client, _PREFIX)
        self._settings = settings or QueueSettings()

    async def announce(self, info: WorkerInfo) -> None:
        check_announced(info)
        ask = {"worker": info.worker, "seconds": self._settings.worker_seconds}
        await self._scripts.run("announce", ask, _pack(info))

    async def retire(self, worker: str) -> None:
        await self._scripts.run("retire", {"worker": worker})

    async def workers(self) -> list[WorkerInfo]:
        reply = await self._scripts.run("workers", {"seconds": self._settings.worker_seconds})
        return [
            msgspec.structs.replace(_unpack(data), seen_at=float(seen_at))
            for data, seen_at in reply
        ]
