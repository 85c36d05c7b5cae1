"""The leases this worker holds, and how the engine's names for them relate to request ids."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from worker.protocol.types import RequestId
from worker.queue.base import Lease


@dataclass(slots=True, eq=False)
class Held:
    """A lease and how far its request has come.

    `key` is the engine's name for it: request id and fence token, so that an attempt that was lost
    and a later one of the same request on the same worker are never mixed up. `answered`: the
    terminal event is chosen, nothing the engine still says matters. `lost`: the lease is no longer
    ours, nothing more is said about it.
    """

    lease: Lease
    started: bool = False
    answered: bool = False
    lost: bool = False

    @property
    def key(self) -> RequestId:
        return engine_key(self.lease)

    @property
    def request_id(self) -> RequestId:
        return self.lease.request.request_id


def engine_key(lease: Lease) -> RequestId:
    return RequestId(f"{lease.request.request_id}/{lease.token}")


class HeldLeases:
    def __init__(self) -> None:
        self._by_key: dict[RequestId, Held] = {}
        self._by_request: defaultdict[RequestId, set[RequestId]] = defaultdict(set)

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Held]:
        return iter(list(self._by_key.values()))

    def add(self, lease: Lease) -> Held:
        held = Held(lease)
        self._by_key[held.key] = held
        self._by_request[held.request_id].add(held.key)
        return held

    def get(self, key: RequestId) -> Held | None:
        return self._by_key.get(key)

    def of(self, request_ids: Iterable[RequestId]) -> list[Held]:
        """Everything held for these requests, lost attempts included."""
        return [
            self._by_key[key]
            for request_id in request_ids
            for key in sorted(self._by_request.get(request_id, ()))
        ]

    def remove(self, held: Held) -> None:
        self._by_key.pop(held.key, None)
        keys = self._by_request[held.request_id]
        keys.discard(held.key)
        if not keys:
            del self._by_request[held.request_id]
