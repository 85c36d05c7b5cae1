"""Which ready requests a worker gets: `scripts/choice.lua` and `scripts/shares.lua` in Python."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from worker.protocol.types import REQUEST_CLASSES, Capacity, RequestClass, RequestId, TenantId
from worker.queue.capacity import Most
from worker.queue.memory_state import ModelState, Record
from worker.queue.settings import QueueSettings


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one request: predicted output of a choice, KV tokens, and tokens to charge for."""

    predicted: int
    kv_tokens: int
    tokens: float


class Choice:
    """One claim's budget. `pick` names the next request, `take` uses the budget up.

    Capacity only shrinks within a claim, so a tenant whose requests do not fit is not looked at
    again.
    """

    def __init__(
        self,
        model: ModelState,
        settings: QueueSettings,
        worker: str,
        capacity: Capacity,
        most: Most,
        now: float,
    ) -> None:
        self._model = model
        self._settings = settings
        self._worker = worker
        self._capacity = capacity
        self._most = most
        self._now = now
        self._free_kv = capacity.kv_tokens
        self._free_rank = capacity.adapter_rank
        self._resident = {"", *capacity.resident}
        self._last_prefix: tuple[TenantId, str] | None = None
        self._taken: list[RequestClass] = []
        self._blocked: set[RequestClass] = set()
        self._skipped: set[tuple[RequestClass, TenantId]] = set()
        self._hindered: dict[RequestId, Record] = {}

    def reserved(self) -> Record | None:
        """The request this worker was emptied for; its class waits while it does not fit."""
        request_id = self._model.reserved.get(self._worker, RequestId(""))
        record = self._model.records.get(request_id)
        if record and record.state == "ready" and record.holder == self._worker:
            if self._fits(record):
                return record
            if self._fits_when_idle(record):
                self._reserve(record)
                return None
            record.holder, record.held_until = "", 0.0
        self._model.reserved.pop(self._worker, None)
        return None

    def pick(self) -> tuple[Record | None, str]:
        """A request, and the lane whose saved-up share it is served from (or none)."""
        for lane in ("urgent", "standard", "batch"):
            if self._model.credits[lane] <= 0:
                continue
            found = self._urgent() if lane == "urgent" else self._of_class(lane)  # type: ignore[arg-type]
            if found:
                return found, lane
        for name in REQUEST_CLASSES:
            if found := self._of_class(name):
                return found, ""
        return None, ""

    def take(self, record: Record, lane: str) -> Cost:
        """Call before the record leaves its line."""
        item, cost = record.item, self.cost(record)
        self._settle_shares(record, cost, lane)
        self._free_kv -= cost.kv_tokens
        if item.digest not in self._resident:
            self._free_rank -= item.rank
            self._resident.add(item.digest)
        self._last_prefix = (item.tenant, item.prefix) if item.prefix else None
        self._hindered.pop(item.id, None)
        self._taken.append(item.request_class)
        return cost

    def close(self) -> None:
        """Count the claim for those passed over: something else of their class was handed out."""
        for record in self._hindered.values():
            if record.item.request_class in self._taken:
                record.passes += 1

    def cost(self, record: Record) -> Cost:
        item = record.item
        mean = self._model.lengths.get(
            (item.tenant, item.digest), self._settings.default_output_tokens
        )
        predicted = max(item.least, min(item.most, math.ceil(mean)))
        return Cost(
            predicted,
            item.prompt + item.n * predicted,
            item.prompt + self._settings.output_price * item.n * predicted,
        )

    def _fits(self, record: Record) -> bool:
        return (not record.item.suspects or self._is_idle) and self.has_room_for(record)

    def has_room_for(self, record: Record) -> bool:
        item = record.item
        if item.digest not in self._resident and item.rank > self._free_rank:
            return False
        begins = self._is_idle and item.prompt + item.n <= self._free_kv
        return begins or self.cost(record).kv_tokens <= self._free_kv

    @property
    def _is_idle(self) -> bool:
        return self._capacity.running == 0 and not self._taken

    def _fits_when_idle(self, record: Record) -> bool:
        item = record.item
        begins = item.prompt + item.n <= self._most.kv_tokens
        return begins and item.rank <= self._most.adapter_rank

    def _reserve(self, record: Record) -> None:
        record.holder = self._worker
        record.held_until = self._now + self._settings.lease_seconds
        self._model.reserved[self._worker] = record.item.id
        place = REQUEST_CLASSES.index(record.item.request_class)
        self._blocked.update(REQUEST_CLASSES[place:])

    def _must_wait_for(self, head: Record) -> bool:
        if head.passes < self._settings.pass_over_limit or not self._fits_when_idle(head):
            return False
        return head.holder in ("", self._worker) or head.held_until < self._now

    def _rating(self, record: Record) -> int:
        """2 for an adapter that is there already, 1 for the prefix of its tenant's last one."""
        item = record.item
        shares = (item.tenant, item.prefix) == self._last_prefix
        return 2 * (item.digest in self._resident) + shares

    def _of_tenant(self, name: RequestClass, tenant: TenantId) -> Record | None:
        line = self._model.lines[name, tenant][: self._settings.look_ahead]
        records = [self._model.records[request_id] for _, _, request_id in line]
        head = records[0]
        if head.passes >= self._settings.pass_over_limit and self._fits(head):
            return head
        if not self._fits(head) and self._must_wait_for(head):
            self._reserve(head)
            return None
        best = max(filter(self._fits, records), key=self._rating, default=None)
        if best is not head and self._fits_when_idle(head):
            self._hindered[head.item.id] = head
        return best

    def _of_class(self, name: RequestClass) -> Record | None:
        for tenant in self._model.counters[name].lowest(self._settings.tenant_look_ahead):
            if name in self._blocked:
                return None
            if (name, tenant) in self._skipped:
                continue
            if found := self._of_tenant(name, tenant):
                return found
            self._skipped.add((name, tenant))
        return None

    def _closing(self, count: int) -> list[RequestId]:
        """Ready requests below `interactive` whose deadline is near, nearest first."""
        deadlines, until = self._model.deadlines, self._now + self._settings.escalation_seconds
        start = bisect_left(deadlines, (self._now, RequestId("")))
        return [one for at, one in deadlines[start : start + count] if at <= until]

    def _urgent(self) -> Record | None:
        for request_id in self._closing(self._settings.look_ahead):
            record = self._model.records[request_id]
            if record.item.request_class not in self._blocked and self._fits(record):
                return record
        return None

    def _settle_shares(self, record: Record, cost: Cost, picked_by: str) -> None:
        waits = {name: bool(counters.waiting()) for name, counters in self._model.counters.items()}
        settings = self._settings
        lanes = (
            ("urgent", settings.escalation_share, bool(self._closing(1))),
            ("standard", settings.standard_share, waits["standard"] and waits["interactive"]),
            (
                "batch",
                settings.batch_share,
                waits["batch"] and (waits["standard"] or waits["interactive"]),
            ),
        )
        for lane, share, contended in lanes:
            credit = self._model.credits[lane]
            if not contended:
                self._model.credits[lane] = min(credit, 0.0)
                continue
            served = lane in (picked_by, record.item.request_class)
            credit += share * cost.tokens - (cost.tokens if served else 0.0)
            limit = settings.credit_limit
            self._model.credits[lane] = max(-limit, min(limit, credit))
