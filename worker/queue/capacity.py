"""What a worker can take at most, learned from what it says while it is idle."""

from __future__ import annotations

from dataclasses import dataclass

from worker.protocol.types import Capacity
from worker.queue.base import CapacityInvalid, WorkerInfo

# Beyond any device, and counted exactly by Lua's numbers.
_MOST = 1 << 53


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
        idle = self._idle.get(worker, Most(_MOST, _MOST))
        return Most(
            max(idle.kv_tokens, capacity.kv_tokens),
            max(idle.adapter_rank, capacity.adapter_rank),
        )


def check_announced(info: WorkerInfo) -> None:
    """Raises CapacityInvalid: the gateway would judge requests by such limits."""
    for name in ("context_tokens", "kv_tokens"):
        _check_one(info.worker, name, getattr(info.limits, name), least=1)
    _check_one(info.worker, "adapter_rank", info.limits.adapter_rank)
    _check(info.worker, info.free)


def _check(worker: str, capacity: Capacity) -> None:
    for name in ("kv_tokens", "adapter_rank", "requests", "running"):
        _check_one(worker, name, getattr(capacity, name))


def _check_one(worker: str, name: str, value: int, least: int = 0) -> None:
    if not least <= value <= _MOST:
        raise CapacityInvalid(
            f"worker {worker} announced {name} = {value}: expected {least} to {_MOST}"
        )
