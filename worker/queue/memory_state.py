"""What one in-process server knows: the counterpart of the keys in `scripts/keys.lua`."""

from __future__ import annotations

import time
from bisect import insort
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from worker.protocol.codec import encode
from worker.protocol.messages import Cancelled, GenerationEvent, LeaseLost
from worker.protocol.types import REQUEST_CLASSES, RequestClass, RequestId, TenantId
from worker.queue.base import DeadLetter, Published, WorkerInfo
from worker.queue.fairness import TokenCounters
from worker.queue.item import QueuedItem
from worker.queue.memory_log import Group, Log, Signal, TokenLogs
from worker.queue.waiter import EventWaiter

State = Literal["ready", "leased", "finished", "lost", "dead"]
Clock = Callable[[], float]


@dataclass(slots=True, eq=False)
class Record:
    """A request's life: ready <-> leased -> finished or lost or dead."""

    item: QueuedItem
    payload: bytes
    sequence: int
    state: State = "ready"
    token: str = ""
    worker: str = ""
    expires_at: float = 0.0
    charge: float = 0.0
    predicted: int = 0
    passes: int = 0
    holder: str = ""
    held_until: float = 0.0


Line = list[tuple[float, int, RequestId]]


@dataclass(slots=True)
class ModelState:
    """One model. Methods change a record and everything that indexes it together."""

    epoch: str
    records: dict[RequestId, Record] = field(default_factory=dict)
    arrivals: int = 0
    arrived: Signal = field(default_factory=Signal)
    lines: defaultdict[tuple[RequestClass, TenantId], Line] = field(
        default_factory=lambda: defaultdict(list)
    )
    deadlines: list[tuple[float, RequestId]] = field(default_factory=list)
    counters: dict[RequestClass, TokenCounters] = field(
        default_factory=lambda: {name: TokenCounters() for name in REQUEST_CLASSES}
    )
    credits: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    lengths: dict[tuple[TenantId, str], float] = field(default_factory=dict)
    tombstones: dict[RequestId, float] = field(default_factory=dict)
    suspects: defaultdict[str, Line] = field(default_factory=lambda: defaultdict(list))
    confined: dict[str, tuple[str, float]] = field(default_factory=dict)
    reserved: dict[str, RequestId] = field(default_factory=dict)
    events: Log = field(default_factory=Log)
    groups: defaultdict[str, Group] = field(default_factory=lambda: defaultdict(Group))
    tokens: TokenLogs = field(default_factory=TokenLogs)
    dead: list[DeadLetter] = field(default_factory=list)
    sequence: int = 0

    def next_sequence(self) -> int:
        self.sequence += 1
        return self.sequence

    def tombstoned(self, request_id: RequestId, now: float) -> bool:
        return self.tombstones.get(request_id, now) > now

    def add_ready(self, record: Record) -> None:
        item = record.item
        self.arrivals += 1
        self.arrived.ring()
        self.counters[item.request_class].wait(item.tenant)
        insort(self.lines[item.request_class, item.tenant], _place(record))
        if item.deadline is not None and item.request_class != "interactive":
            insort(self.deadlines, (item.deadline, item.id))
        if item.suspects:
            insort(self.suspects[item.suspects], _place(record))
        record.state = "ready"

    def remove_ready(self, record: Record) -> None:
        item = record.item
        if item.deadline is not None and item.request_class != "interactive":
            self.deadlines.remove((item.deadline, item.id))
        if item.suspects:
            self.suspects[item.suspects].remove(_place(record))
            if not self.suspects[item.suspects]:
                del self.suspects[item.suspects]
        line = self.lines[item.request_class, item.tenant]
        line.remove(_place(record))
        if not line:
            del self.lines[item.request_class, item.tenant]
            self.counters[item.request_class].stop_waiting(item.tenant)

    def remove_lease(self, record: Record, correction: float) -> None:
        item = record.item
        self.counters[item.request_class].let_go(item.tenant, correction)

    def withdraw(self, record: Record) -> None:
        if record.state == "ready":
            self.remove_ready(record)
        elif record.state == "leased":
            self.remove_lease(record, -record.charge)

    def close(self, record: Record, state: State) -> None:
        record.state = state
        record.payload = b""
        if state != "finished":
            record.token = ""

    def add_terminal(self, record: Record, event: GenerationEvent, now: float) -> None:
        self.events.append(encode(event))
        if record.item.stream:
            self.tokens.append(record.item.id, encode(event), now)

    def answer_cancelled(self, record: Record, now: float) -> None:
        item = record.item
        self.add_terminal(record, Cancelled(request_id=item.id, attempt=item.attempt), now)
        self.withdraw(record)
        self.close(record, "finished")

    def lose(self, record: Record) -> None:
        item = record.item
        event = LeaseLost(
            request_id=item.id, attempt=item.attempt, worker=record.worker, alone=item.alone
        )
        self.events.append(encode(event))
        self.withdraw(record)
        self.close(record, "lost")

    def bury(self, record: Record, reason: str) -> None:
        """Keep an undecodable request for an operator, and hand it out to nobody."""
        letter_id = str(self.next_sequence())
        self.dead.append(DeadLetter(letter_id, "request", record.item.id, reason, record.payload))
        self.withdraw(record)
        self.close(record, "dead")


def _place(record: Record) -> tuple[float, int, RequestId]:
    return (record.item.order, record.sequence, record.item.id)


class MemoryServer:
    """What a Redis server is to `redis.py`: shared by all ports of one process.

    `clock` gives Unix seconds; tests inject their own.
    """

    def __init__(self, clock: Clock = time.time) -> None:
        self.clock = clock
        self.listeners: defaultdict[RequestId, set[EventWaiter]] = defaultdict(set)
        self.cancel_listeners: set[Callable[[str, list[RequestId]], None]] = set()
        self._models: dict[str, ModelState] = {}
        self._lives = 0
        self.workers: dict[str, tuple[WorkerInfo, float]] = {}
        self.prefixes: dict[str, Published] = {}

    def model(self, name: str) -> ModelState:
        if name not in self._models:
            self._lives += 1
            self._models[name] = ModelState(epoch=f"memory-{self._lives}")
        return self._models[name]

    def flush(self) -> None:
        """Forget everything, as FLUSHALL does."""
        self._models.clear()
        self.workers.clear()
        self.prefixes.clear()
