"""The queue's ports. `redis.py` is the one in production, `memory.py` a shipped fake.

    dispatcher --enqueue--> [ready] --claim--> [leased] --finish--> event stream --read--> collector
                               ^                  |
                               +--release / reap--+      (reap also tells the collector: LeaseLost)

The item's record outlives `finish`: only `forget`, called after the collector's SQL commit,
removes it. "Dispatched in SQL, and not `known` here" therefore means lost.

Both implementations pass one conformance suite (`tests/queue/`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol

import msgspec

from worker.protocol.messages import GenerateRequest, GenerationEvent, TerminalEvent
from worker.protocol.types import Capacity, RequestId, WorkerLimits

EnqueueOutcome = Literal["enqueued", "duplicate", "cancelled"]


class QueueError(Exception):
    """Something about the queue that its caller can act on.

    QueueError
    ├── QueueUnavailable   the server cannot be reached or refuses writes: try again later
    └── CapacityInvalid    a worker announced impossible numbers
    """


class QueueUnavailable(QueueError):
    pass


class CapacityInvalid(QueueError):
    pass


class Lease(msgspec.Struct, frozen=True):
    """A request held by one worker until `expires_at` (Unix seconds, the server's clock).

    `token` is random (128 bits, hex): whoever cannot show it changes nothing.
    """

    request: GenerateRequest
    token: str
    worker: str
    expires_at: float


class Renewal(msgspec.Struct, frozen=True):
    """What a renewal told: leases no longer ours, and requests whose tombstone is set."""

    lost: tuple[RequestId, ...] = ()
    cancelled: tuple[RequestId, ...] = ()


class WorkerInfo(msgspec.Struct, frozen=True):
    """What a live worker announces; expires if not repeated."""

    worker: str
    model: str
    limits: WorkerLimits
    free: Capacity
    seen_at: float = 0.0


class StreamEntry(msgspec.Struct, frozen=True):
    """An event with the stream's own id, to acknowledge. `event` is None for undecodable bytes
    (already moved to the dead letters; acknowledge and go on)."""

    entry_id: str
    event: GenerationEvent | None


class ClassDepth(msgspec.Struct, frozen=True):
    ready: int
    leased: int


class RequestQueue(Protocol):
    """Requests of one model, waiting or leased. Every call is one atomic step.

    All methods raise QueueUnavailable when the server cannot be reached.
    """

    model: str

    async def epoch(self) -> str:
        """The name of this life of the server; a new one appears after it lost its data."""

    async def enqueue(self, requests: Sequence[GenerateRequest]) -> list[EnqueueOutcome]:
        """Idempotent by (request_id, attempt); an older attempt never replaces a newer one.

        A request whose tombstone is set is not queued: its outcome is `cancelled`.
        """

    async def claim(self, worker: str, capacity: Capacity) -> list[Lease]:
        """Lease requests that fit `capacity` together: class, then the tenant with the lowest
        virtual token counter, then its requests in order, preferring resident adapters.

        Raises CapacityInvalid. Returns [] while the event stream is longer than its limit.
        """

    async def renew(self, worker: str, leases: Sequence[Lease]) -> Renewal:
        """Extend leases whose token still matches."""

    async def emit(self, lease: Lease, event: GenerationEvent) -> bool:
        """Append a non-terminal event. False, and nothing happens, when the lease is lost."""

    async def finish(self, lease: Lease, event: TerminalEvent) -> bool:
        """Append the event and drop the lease. False, and nothing happens, when it is lost."""

    async def release(self, lease: Lease) -> bool:
        """Give a request back unfinished (drain): ready again, same attempt, charge refunded."""

    async def cancel(self, request_ids: Sequence[RequestId]) -> list[RequestId]:
        """Set tombstones. Ready requests are removed and answered by a Cancelled event; running
        ones learn of it (`cancellations`, `renew`). Returns those that were ready."""

    async def cancellations(self, timeout: float) -> list[RequestId]:
        """Wait for cancel notices to this process; [] after `timeout` seconds."""

    async def reap(self) -> list[RequestId]:
        """Turn expired leases into LeaseLost events. Returns the ids."""

    async def forget(self, request_ids: Sequence[RequestId]) -> None:
        """Remove the records (not tombstones of running work) of requests settled in SQL."""

    async def known(self, request_ids: Sequence[RequestId]) -> list[bool]:
        """Whether a record of each exists: ready, leased or finished but not forgotten."""

    async def depth(self) -> dict[str, ClassDepth]:
        """Ready and leased requests per class."""


class EventStream(Protocol):
    """Events of one model's workers, read by a group of collectors, at least once."""

    async def read(self, consumer: str, count: int, timeout: float) -> list[StreamEntry]:
        """Own unacknowledged entries first after a restart, then entries of dead consumers,
        then new ones; waits up to `timeout` seconds for a first new one."""

    async def ack(self, entry_ids: Sequence[str]) -> None: ...

    async def pending(self) -> int:
        """Entries not yet acknowledged."""


class WorkerDirectory(Protocol):
    """Live workers of all models."""

    async def announce(self, info: WorkerInfo) -> None: ...

    async def retire(self, worker: str) -> None: ...

    async def workers(self) -> list[WorkerInfo]: ...


class Waiter(Protocol):
    async def wait(self, timeout: float) -> bool:
        """True once rung since `listen` was entered, False after `timeout` seconds."""


class CompletionBell(Protocol):
    """Tells waiting clients that SQL has a terminal state: a hint, never the truth."""

    async def ring(self, request_ids: Sequence[RequestId]) -> None: ...

    def listen(self, request_id: RequestId) -> AbstractAsyncContextManager[Waiter]:
        """Enter before reading the row, so that no ring between read and wait is missed."""
