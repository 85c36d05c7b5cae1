"""Requests of one model in this process: the same promises as Redis, for tests and offline use."""

from __future__ import annotations

from collections.abc import Sequence

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
from worker.queue.item import describe
from worker.queue.memory_claim import Claim
from worker.queue.memory_log import Signal
from worker.queue.memory_state import MemoryServer, ModelState, Record
from worker.queue.settings import QueueSettings


class MemoryQueue:
    """A RequestQueue over a MemoryServer. One instance stands for one process."""

    def __init__(
        self, server: MemoryServer, model: str, settings: QueueSettings | None = None
    ) -> None:
        self.model = model
        self._server = server
        self._settings = settings or QueueSettings()
        self._capacities = WorkerCapacities()
        self._notices: list[RequestId] = []
        self._noticed = Signal()
        self._arrivals = 0
        server.cancel_listeners.add(self._notice)

    @property
    def _state(self) -> ModelState:
        return self._server.model(self.model)

    async def close(self) -> None:
        self._server.cancel_listeners.discard(self._notice)

    async def epoch(self) -> str:
        return self._state.epoch

    async def enqueue(self, requests: Sequence[GenerateRequest]) -> list[EnqueueOutcome]:
        return [self._enqueue(request) for request in requests]

    def _enqueue(self, request: GenerateRequest) -> EnqueueOutcome:
        state, request_id = self._state, request.request_id
        old = state.records.get(request_id)
        if old and old.item.attempt >= request.attempt:
            return "duplicate"
        if state.tombstoned(request_id, self._server.clock()):
            return "cancelled"
        if old:
            state.withdraw(old)
        item = describe(request, self._settings.prefix_tokens)
        state.records[request_id] = Record(item, encode(request), state.next_sequence())
        state.add_ready(state.records[request_id])
        return "enqueued"

    async def claim(self, worker: str, capacity: Capacity) -> list[Lease]:
        most = self._capacities.observe(worker, capacity)
        state = self._state
        if len(state.events.entries) > self._settings.stream_limit:
            return []
        for counters in state.counters.values():
            counters.rebase(self._settings.rebase_at)
        if not capacity.requests:
            return []
        claim = Claim(state, self._settings, worker, capacity, most, self._server.clock())
        return [lease for record in claim.run() if (lease := self._lease(record)) is not None]

    def _lease(self, record: Record) -> Lease | None:
        try:
            request = decode_request(record.payload)
        except CodecError as error:
            self._state.bury(record, str(error))
            return None
        return Lease(request, record.token, record.worker, record.expires_at, record.predicted)

    async def renew(self, worker: str, leases: Sequence[Lease]) -> Renewal:
        now = self._server.clock()
        if worker in self._state.confined:
            group, _ = self._state.confined[worker]
            self._state.confined[worker] = group, now + self._settings.lease_seconds
        lost: list[RequestId] = []
        cancelled: list[RequestId] = []
        for lease in leases:
            request_id = lease.request.request_id
            if record := self._held(lease):
                record.expires_at = now + self._settings.lease_seconds
                if self._state.tombstoned(request_id, now):
                    cancelled.append(request_id)
            else:
                lost.append(request_id)
        return Renewal(tuple(lost), tuple(cancelled))

    def _held(self, lease: Lease) -> Record | None:
        record = self._shown(lease)
        return record if record and record.state == "leased" else None

    def _shown(self, lease: Lease) -> Record | None:
        """The record whose token the lease shows, whatever became of it."""
        record = self._state.records.get(lease.request.request_id)
        return record if record and record.token == lease.token else None

    async def emit(self, lease: Lease, event: GenerationEvent) -> bool:
        if not self._held(lease):
            return False
        if isinstance(event, Delta):
            self._state.tokens.append(event.request_id, encode(event), self._server.clock())
        else:
            self._state.events.append(encode(event))
        return True

    async def finish(self, lease: Lease, event: TerminalEvent) -> bool:
        record = self._shown(lease)
        if record is None or record.state not in ("leased", "finished"):
            return False
        if record.state == "finished":
            return True
        self._state.add_terminal(record, event, self._server.clock())
        correction = self._settle(record, event) if isinstance(event, Finished) else 0.0
        self._state.remove_lease(record, correction)
        self._state.close(record, "finished")
        return True

    async def deliver(self, said: Sequence[tuple[Lease, GenerationEvent]]) -> list[bool]:
        return [
            await (
                self.finish(lease, event)
                if isinstance(event, TerminalEvent)
                else self.emit(lease, event)
            )
            for lease, event in said
        ]

    def _settle(self, record: Record, event: Finished) -> float:
        item, usage = record.item, event.usage
        length = usage.completion / item.n
        key = (item.tenant, item.digest)
        mean = self._state.lengths.get(key, length)
        self._state.lengths[key] = mean + self._settings.length_smoothing * (length - mean)
        actual = usage.prompt + self._settings.output_price * usage.completion
        return actual / item.weight - record.charge

    async def release(self, lease: Lease) -> bool:
        record = self._shown(lease)
        if record is None or record.state not in ("leased", "ready"):
            return False
        if record.state == "ready":
            return True
        state, item = self._state, record.item
        now = self._server.clock()
        if state.tombstoned(item.id, now):
            state.answer_cancelled(record, now)
            return True
        state.counters[item.request_class].charge(item.tenant, -record.charge)
        state.add_ready(record)
        state.remove_lease(record, 0.0)
        return True

    async def cancel(self, request_ids: Sequence[RequestId]) -> list[RequestId]:
        now = self._server.clock()
        ready: list[RequestId] = []
        running: list[RequestId] = []
        for request_id in request_ids:
            self._state.tombstones[request_id] = now + self._settings.tombstone_seconds
            record = self._state.records.get(request_id)
            if record and record.state == "ready":
                self._state.answer_cancelled(record, now)
                ready.append(request_id)
            elif record and record.state == "leased":
                running.append(request_id)
        if running:
            for listener in self._server.cancel_listeners:
                listener(self.model, running)
        return ready

    def _notice(self, model: str, request_ids: list[RequestId]) -> None:
        if model == self.model:
            self._notices += request_ids
            self._noticed.ring()

    async def withdraw(self, request_ids: Sequence[RequestId]) -> list[RequestId]:
        records = self._state.records
        taken = [one for one in request_ids if one in records and records[one].state == "ready"]
        await self.forget(taken)
        return taken

    async def arrivals(self, timeout: float) -> bool:
        if self._state.arrivals == self._arrivals:
            await self._state.arrived.wait(timeout)
        before, self._arrivals = self._arrivals, self._state.arrivals
        return self._arrivals != before

    async def cancellations(self, timeout: float) -> list[RequestId]:
        if not self._notices:
            await self._noticed.wait(timeout)
        notices, self._notices = self._notices, []
        return notices

    async def reap(self) -> list[RequestId]:
        now, state = self._server.clock(), self._state
        leased = [one for one in state.records.values() if one.state == "leased"]
        expired = sorted(
            (one for one in leased if one.expires_at <= now),
            key=lambda one: (one.expires_at, one.item.id),
        )
        for record in expired:
            if state.tombstoned(record.item.id, now):
                state.answer_cancelled(record, now)
            else:
                state.lose(record)
        return [record.item.id for record in expired]

    async def forget(self, request_ids: Sequence[RequestId]) -> None:
        for request_id in request_ids:
            if record := self._state.records.pop(request_id, None):
                self._state.withdraw(record)

    async def known(self, request_ids: Sequence[RequestId]) -> list[bool]:
        return [request_id in self._state.records for request_id in request_ids]

    async def depth(self) -> dict[str, ClassDepth]:
        counts = {name: {"ready": 0, "leased": 0} for name in REQUEST_CLASSES}
        for record in self._state.records.values():
            if record.state in ("ready", "leased"):
                counts[record.item.request_class][record.state] += 1
        return {name: ClassDepth(**count) for name, count in counts.items()}

    async def counters(self) -> dict[str, dict[TenantId, float]]:
        return {name: one.waiting() for name, one in self._state.counters.items()}

    async def dead_letters(self, count: int = 100) -> list[DeadLetter]:
        return self._state.dead[::-1][:count]
