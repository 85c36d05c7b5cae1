"""Requests of one model in Redis. Every call is one Lua script, so one atomic step.

Keys and their meaning are listed in `scripts/keys.lua`, the choice in `scripts/choice.lua`.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Sequence
from itertools import chain
from typing import Any, cast

import msgspec
from redis.asyncio import Redis

from worker.protocol.codec import CodecError, decode_request, encode
from worker.protocol.messages import (
    Delta,
    Finished,
    GenerateRequest,
    GenerationEvent,
    TerminalEvent,
)
from worker.protocol.types import REQUEST_CLASSES, Capacity, RequestId, TenantId
from worker.queue.base import ClassDepth, DeadLetter, EnqueueOutcome, Lease, Renewal
from worker.queue.capacity import WorkerCapacities
from worker.queue.connection import reaching
from worker.queue.item import describe
from worker.queue.lua import Scripts, prefix
from worker.queue.notices import Notices
from worker.queue.settings import QueueSettings

_ENQUEUE_AT_ONCE = 200
_REAP_AT_ONCE = 200
_ASK_AT_ONCE = 1_000

_pack = msgspec.msgpack.Encoder().encode
_unpack_ids = msgspec.msgpack.Decoder(list[RequestId]).decode


class RedisQueue:
    """A RequestQueue. `client` comes from `connect`; one instance serves one event loop."""

    def __init__(self, client: Redis, model: str, settings: QueueSettings | None = None) -> None:
        self.model = model
        self._settings = settings or QueueSettings()
        self._client = client
        self._prefix = prefix(model)
        self._scripts = Scripts(client, self._prefix)
        self._capacities = WorkerCapacities()
        self._unanswered: dict[str, str] = {}
        self._notices = Notices(client, f"{self._prefix}:cancels")
        self._arrivals = Notices(client, f"{self._prefix}:arrivals")

    async def close(self) -> None:
        """Leave the channels; the client stays open."""
        await self._notices.close()
        await self._arrivals.close()

    async def epoch(self) -> str:
        key = f"{self._prefix}:epoch"
        with reaching(self._scripts.address):
            pipeline = self._client.pipeline(transaction=True)
            pipeline.set(key, secrets.token_hex(8), nx=True)
            pipeline.get(key)
            return cast(bytes, (await pipeline.execute())[1]).decode()

    async def enqueue(self, requests: Sequence[GenerateRequest]) -> list[EnqueueOutcome]:
        outcomes: list[EnqueueOutcome] = []
        for start in range(0, len(requests), _ENQUEUE_AT_ONCE):
            chunk = requests[start : start + _ENQUEUE_AT_ONCE]
            metas = (_pack(describe(one, self._settings.prefix_tokens)) for one in chunk)
            pairs = chain.from_iterable(zip(metas, map(encode, chunk), strict=True))
            reply = await self._scripts.run("enqueue", {}, *pairs)
            outcomes += [one.decode() for one in reply]
        return outcomes

    async def claim(self, worker: str, capacity: Capacity) -> list[Lease]:
        most = self._capacities.observe(worker, capacity)
        if capacity.requests == 0:
            return []
        token = self._unanswered.pop(worker, None) or secrets.token_hex(16)
        ask = {
            **msgspec.structs.asdict(capacity),
            **self._claim_settings(),
            "worker": worker,
            "token": token,
            "most_kv_tokens": most.kv_tokens,
            "most_adapter_rank": most.adapter_rank,
        }
        try:
            reply = await self._scripts.run("claim", ask)
            leases = [await self._lease(worker, token, *fields) for fields in reply]
        except BaseException:
            self._unanswered[worker] = token
            raise
        return [lease for lease in leases if lease is not None]

    def _claim_settings(self) -> dict[str, object]:
        names = QueueSettings.__dataclass_fields__
        return {name: getattr(self._settings, name) for name in names}

    async def _lease(
        self, worker: str, token: str, id: bytes, payload: bytes, expiry: bytes, predicted: bytes
    ) -> Lease | None:
        try:
            request = decode_request(payload)
        except CodecError as error:
            ask = {
                "id": id.decode(),
                "token": token,
                "reason": str(error),
                "dead_letter_limit": self._settings.dead_letter_limit,
            }
            await self._scripts.run("bury", ask, payload)
            return None
        return Lease(request, token, worker, float(expiry), int(predicted))

    async def arrivals(self, timeout: float) -> bool:
        return bool(await self._arrivals.wait(timeout))

    async def renew(self, worker: str, leases: Sequence[Lease]) -> Renewal:
        lost: list[RequestId] = []
        cancelled: list[RequestId] = []
        for start in range(0, len(leases), _ASK_AT_ONCE):
            chunk = leases[start : start + _ASK_AT_ONCE]
            ask = {
                "worker": worker,
                "ids": [lease.request.request_id for lease in chunk],
                "tokens": [lease.token for lease in chunk],
                "lease_seconds": self._settings.lease_seconds,
            }
            gone, stopped = await self._scripts.run("renew", ask)
            lost += _ids(gone)
            cancelled += _ids(stopped)
        return Renewal(tuple(lost), tuple(cancelled))

    async def emit(self, lease: Lease, event: GenerationEvent) -> bool:
        return (await self.deliver([(lease, event)]))[0]

    async def finish(self, lease: Lease, event: TerminalEvent) -> bool:
        return (await self.deliver([(lease, event)]))[0]

    async def deliver(self, said: Sequence[tuple[Lease, GenerationEvent]]) -> list[bool]:
        ask = {
            "said": [_saying(lease, event) for lease, event in said],
            "output_price": self._settings.output_price,
            "length_smoothing": self._settings.length_smoothing,
            "length_seconds": self._settings.length_seconds,
            **self._stream_settings(),
        }
        reply = await self._scripts.run("deliver", ask, *(encode(event) for _, event in said))
        return [bool(taken) for taken in reply]

    async def release(self, lease: Lease) -> bool:
        ask = {"id": lease.request.request_id, "token": lease.token, **self._stream_settings()}
        return bool(await self._scripts.run("release", ask))

    def _stream_settings(self) -> dict[str, object]:
        return {
            "token_stream_limit": self._settings.token_stream_limit,
            "token_stream_seconds": self._settings.token_stream_seconds,
        }

    async def cancel(self, request_ids: Sequence[RequestId]) -> list[RequestId]:
        ready: list[RequestId] = []
        for start in range(0, len(request_ids), _ASK_AT_ONCE):
            ask = {
                "ids": list(request_ids[start : start + _ASK_AT_ONCE]),
                "tombstone_seconds": self._settings.tombstone_seconds,
                **self._stream_settings(),
            }
            ready += _ids(await self._scripts.run("cancel", ask))
        return ready

    async def withdraw(self, request_ids: Sequence[RequestId]) -> list[RequestId]:
        taken: list[RequestId] = []
        for start in range(0, len(request_ids), _ASK_AT_ONCE):
            ask = {"ids": list(request_ids[start : start + _ASK_AT_ONCE])}
            taken += _ids(await self._scripts.run("withdraw", ask))
        return taken

    async def cancellations(self, timeout: float) -> list[RequestId]:
        notices = await self._notices.wait(timeout)
        return [one for notice in notices for one in _unpack_ids(notice)]

    async def reap(self) -> list[RequestId]:
        ask = {"limit": _REAP_AT_ONCE, **self._stream_settings()}
        reaped: list[RequestId] = []
        while True:
            some = await self._scripts.run("reap", ask)
            reaped += _ids(some)
            if len(some) < _REAP_AT_ONCE:
                return reaped

    async def forget(self, request_ids: Sequence[RequestId]) -> None:
        for start in range(0, len(request_ids), _ASK_AT_ONCE):
            ask = {"ids": list(request_ids[start : start + _ASK_AT_ONCE])}
            await self._scripts.run("forget", ask)

    async def known(self, request_ids: Sequence[RequestId]) -> list[bool]:
        with reaching(self._scripts.address):
            pipeline = self._client.pipeline(transaction=False)
            for request_id in request_ids:
                pipeline.exists(f"{self._prefix}:item:{request_id}")
            return [bool(found) for found in await pipeline.execute()]

    async def depth(self) -> dict[str, ClassDepth]:
        with reaching(self._scripts.address):
            counts = await _answer(self._client.hgetall(f"{self._prefix}:depth"))
        return {
            name: ClassDepth(
                ready=int(counts.get(f"ready:{name}".encode(), 0)),
                leased=int(counts.get(f"leased:{name}".encode(), 0)),
            )
            for name in REQUEST_CLASSES
        }

    async def counters(self) -> dict[str, dict[TenantId, float]]:
        with reaching(self._scripts.address):
            pipeline = self._client.pipeline(transaction=True)
            for name in REQUEST_CLASSES:
                pipeline.zrange(f"{self._prefix}:backlog:{name}", 0, -1, withscores=True)
            replies = await pipeline.execute()
        return {
            name: {TenantId(tenant.decode()): score for tenant, score in reply}
            for name, reply in zip(REQUEST_CLASSES, replies, strict=True)
        }

    async def dead_letters(self, count: int = 100) -> list[DeadLetter]:
        with reaching(self._scripts.address):
            entries = await _answer(self._client.xrevrange(f"{self._prefix}:dead", count=count))
        return [_dead_letter(entry_id, fields) for entry_id, fields in entries]


def _saying(lease: Lease, event: GenerationEvent) -> dict[str, object]:
    kind = "delta" if isinstance(event, Delta) else "told"
    return {
        "id": lease.request.request_id,
        "token": lease.token,
        "kind": "terminal" if isinstance(event, TerminalEvent) else kind,
        "usage": event.usage if isinstance(event, Finished) else None,
    }


def _dead_letter(entry_id: bytes, fields: dict[bytes, bytes]) -> DeadLetter:
    return DeadLetter(
        entry_id=entry_id.decode(),
        kind="request" if fields[b"kind"] == b"request" else "event",
        request_id=fields[b"request_id"].decode(),
        reason=fields[b"reason"].decode(),
        data=fields[b"data"],
    )


def _ids(reply: Sequence[bytes]) -> list[RequestId]:
    return [RequestId(one.decode()) for one in reply]


async def _answer(reply: Any) -> Any:
    """redis-py types one command for both its clients; ours always answers later."""
    return await cast(Awaitable[Any], reply)
