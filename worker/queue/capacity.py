"""What a worker can take at most, learned from what it says while it is idle."""

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
    """What each worker could take when it was last idle; unbounded until it was seen idle.

    A request beyond it cannot run there however long the worker is kept empty for it.
    """

    def __init__(self) -> None:
        self._idle: dict[str, Most] = {}

    def observe(self, worker: str, capacity: Capacity) -> Most:
        """Raises CapacityInvalid."""
        _check(worker, capacity)
        if capacity.running == 0:
            self._idle[worker] = Most(capacity.kv_tokens, capacity.adapter_rank)
        idle = self._idle.get(worker, Most(_UNKNOWN, _UNKNOWN))
        return Most(
            max(idle.kv_tokens, capacity.kv_tokens),
            max(idle.adapter_rank, capacity.adapter_rank),
        )


def _check(worker: str, capacity: Capacity) -> None:
    for name in ("kv_tokens", "adapter_rank", "requests", "running"):
        if (value := getattr(capacity, name)) < 0:
            raise CapacityInvalid(f"worker {worker} announced {name} = {value}: never negative")
