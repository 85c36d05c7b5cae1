"""What a worker can take at most, learned from what it says it can take now."""

from __future__ import annotations

from dataclasses import dataclass

from worker.protocol.types import Capacity
from worker.queue.base import CapacityInvalid

# Beyond any device, and small enough for a signed 64-bit integer.
_UNKNOWN = 1 << 60


@dataclass(frozen=True, slots=True)
class Most:
    """KV tokens and adapter rank of an idle worker."""

    kv_tokens: int
    adapter_rank: int


class WorkerCapacities:
    """The most that each worker ever announced; unbounded until it was seen idle.

    A request beyond it can never run there, so the worker is not kept empty for it.
    """

    def __init__(self) -> None:
        self._most: dict[str, Most] = {}

    def observe(self, worker: str, capacity: Capacity) -> Most:
        """Raises CapacityInvalid."""
        _check(worker, capacity)
        known = self._most.get(worker)
        if known is None and capacity.running > 0:
            return Most(_UNKNOWN, _UNKNOWN)
        known = known or Most(0, 0)
        most = Most(
            max(known.kv_tokens, capacity.kv_tokens),
            max(known.adapter_rank, capacity.adapter_rank),
        )
        self._most[worker] = most
        return most


def _check(worker: str, capacity: Capacity) -> None:
    for name in ("kv_tokens", "adapter_rank", "requests", "running"):
        if (value := getattr(capacity, name)) < 0:
            raise CapacityInvalid(f"worker {worker} announced {name} = {value}: never negative")
