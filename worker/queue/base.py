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
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Literal, Protocol

import msgspec

from worker.protocol.messages import GenerateRequest, GenerationEvent, TerminalEvent
from worker.protocol.types import Capacity, RequestId, SharedPrefix, TenantId, WorkerLimits

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

    `token` is random (128 bits, hex, one for each claim): whoever cannot show it changes nothing.
    `predicted_tokens` is the expected output of one choice, from recent outputs of the same
    tenant and adapter, at most `max_tokens` (0: unknown).
    """

    request: GenerateRequest
    token: str
    worker: str
    expires_at: float
    predicted_tokens: int = 0


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


class DeadLetter(msgspec.Struct, frozen=True):
    """Bytes that this release could not read, kept for an operator. `request_id` is empty when
    they were an event's: then nothing is known but the bytes."""

    entry_id: str
    kind: Literal["request", "event"]
    request_id: str
    reason: str
    data: bytes


class ClassDepth(msgspec.Struct, frozen=True):
    ready: int
    leased: int


class Published(msgspec.Struct, frozen=True):
    """`version` names the content."""

    version: str
    prefixes: tuple[SharedPrefix, ...]


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

        Suspects go to an idle worker, which then gets the rest of their group and nothing else
        until it is idle again.

        Raises CapacityInvalid. Returns [] while the event stream is longer than its limit.
        """

    async def arrivals(self, timeout: float) -> bool:
        """Wait until a request has become ready: True, at once if one has since the call before;
        False after `timeout` seconds. A hint: requests that were passed over tell of nothing."""

    async def renew(self, worker: str, leases: Sequence[Lease]) -> Renewal:
        """Extend leases whose token still matches."""

    async def emit(self, lease: Lease, event: GenerationEvent) -> bool:
        """Append a non-terminal event. False, and nothing happens, when the lease is lost.

        A Delta goes to the request's own `TokenStream`, never to the collector.
        """

    async def finish(self, lease: Lease, event: TerminalEvent) -> bool:
        """Append the event and drop the lease. False, and nothing happens, when it is lost.

        Repeating a call whose answer was lost answers True and appends nothing. The event of a
        request with `stream` set also ends its `TokenStream`.
        """

    async def deliver(self, said: Sequence[tuple[Lease, GenerationEvent]]) -> list[bool]:
        """`emit` or `finish` each, in order and in one step: whether each was taken."""

    async def release(self, lease: Lease) -> bool:
        """Give a request back unfinished (drain): ready again, same attempt, charge refunded.

        A cancelled request is answered by a Cancelled event instead of being ready again.
        """

    async def cancel(self, request_ids: Sequence[RequestId]) -> list[RequestId]:
        """Set tombstones. Ready requests are removed and answered by a Cancelled event; running
        ones learn of it (`cancellations`, `renew`). Returns those that were ready."""

    async def withdraw(self, request_ids: Sequence[RequestId]) -> list[RequestId]:
        """Take out those that are ready, without an event, and return them: they are not `known`
        any more. Leased ones stay as they are."""

    async def cancellations(self, timeout: float) -> list[RequestId]:
        """Wait for cancel notices to this process; [] after `timeout` seconds."""

    async def reap(self) -> list[RequestId]:
        """Turn expired leases into LeaseLost events (Cancelled, where a tombstone is set).

        Returns the ids. Their records stay, so they remain `known`, until the next attempt is
        enqueued or they are forgotten. `alone` is told of suspects that ran alone.
        """

    async def forget(self, request_ids: Sequence[RequestId]) -> None:
        """Remove the records (never tombstones) of requests whose SQL state is terminal.

        One that is still ready or leased is withdrawn: its worker finds the lease lost. A request
        that goes back to `queued` in SQL is not forgotten: its next enqueue replaces the record.
        """

    async def known(self, request_ids: Sequence[RequestId]) -> list[bool]:
        """Whether a record of each exists: ready, leased or finished but not forgotten."""

    async def depth(self) -> dict[str, ClassDepth]:
        """Ready and leased requests per class."""

    async def counters(self) -> dict[str, dict[TenantId, float]]:
        """Virtual token counters of the tenants that wait, per class."""

    async def dead_letters(self, count: int = 100) -> list[DeadLetter]:
        """Newest first: requests and events that this release could not read.

        Such a request is neither ready nor leased, and stays `known` until it is forgotten.
        """


class EventStream(Protocol):
    """Events of one model's workers, read by a group of collectors, at least once."""

    async def read(self, consumer: str, count: int, timeout: float) -> list[StreamEntry]:
        """Own unacknowledged entries first after a restart, then entries of dead consumers,
        then new ones; waits up to `timeout` seconds for a first new one."""

    async def ack(self, entry_ids: Sequence[str]) -> None: ...

    async def pending(self) -> int:
        """Entries not yet acknowledged."""


class TokenReader(Protocol):
    async def read(self, timeout: float) -> list[StreamEntry]:
        """The next entries: Delta, then the terminal event. Waits up to `timeout` seconds for a
        first one. Undecodable entries have no event. Raises QueueUnavailable: read again."""


class TokenStream(Protocol):
    """Tokens of requests with `stream` set, for the client that waits for them.

    Capped and expiring; a hint, never the truth: an attempt that was lost is followed by another
    one's entries from index 0.
    """

    def follow(self, request_id: RequestId) -> AbstractContextManager[TokenReader]:
        """A reader from the first entry on."""


class WorkerDirectory(Protocol):
    """Live workers of all models."""

    async def announce(self, info: WorkerInfo) -> None:
        """Raises CapacityInvalid."""

    async def retire(self, worker: str) -> None: ...

    async def workers(self) -> list[WorkerInfo]: ...


class SharedPrefixes(Protocol):
    """Prompts' beginnings that the operator shares among tenants, of one model: workers keep their
    KV. The gateway publishes them, again after the server lost its data."""

    async def publish(self, prefixes: Sequence[SharedPrefix]) -> bool:
        """All there are; False, and nothing happens, when they are known already."""

    async def read(self, known: str) -> Published | None:
        """None while nothing else is published than the version `known`."""


class Waiter(Protocol):
    async def wait(self, timeout: float) -> bool:
        """True when rung since the wait before, or since `listen` was entered; False after
        `timeout` seconds."""


class CompletionBell(Protocol):
    """Tells waiting clients that SQL has a terminal state: a hint, never the truth."""

    async def ring(self, request_ids: Sequence[RequestId]) -> None: ...

    def listen(self, request_id: RequestId) -> AbstractAsyncContextManager[Waiter]:
        """Enter before reading the row, so that no ring between read and wait is missed."""
