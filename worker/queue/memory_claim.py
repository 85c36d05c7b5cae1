"""One claim: `scripts/claim.lua` in Python."""

from __future__ import annotations

import secrets

from worker.protocol.types import Capacity
from worker.queue.capacity import Most
from worker.queue.choice import Choice
from worker.queue.memory_state import ModelState, Record
from worker.queue.settings import QueueSettings


class Claim:
    """Leases what fits `capacity` to `worker`. Runs once."""

    def __init__(
        self,
        state: ModelState,
        settings: QueueSettings,
        worker: str,
        capacity: Capacity,
        most: Most,
        now: float,
    ) -> None:
        self._state = state
        self._settings = settings
        self._worker = worker
        self._capacity = capacity
        self._now = now
        self._expires_at = now + settings.lease_seconds
        self._choice = Choice(state, settings, worker, capacity, most, now)
        self._token = secrets.token_hex(16)
        self._taken: list[Record] = []

    def run(self) -> list[Record]:
        group, until = self._state.confined.pop(self._worker, ("", 0.0))
        if group and self._capacity.running and until > self._now:
            self._take_suspects(group)
        else:
            self._take_others()
        self._choice.close()
        return self._taken

    @property
    def _wants_more(self) -> bool:
        return len(self._taken) < self._capacity.requests

    def _take_others(self) -> None:
        record, lane = self._choice.reserved(), ""
        while self._wants_more:
            if record is None:
                record, lane = self._choice.pick()
            if record is None:
                return
            if self._take(record, lane) and record.item.suspects:
                self._take_suspects(record.item.suspects)
                return
            record, lane = None, ""

    def _take_suspects(self, group: str) -> None:
        """They run with their like and nobody else, so that whoever kills a worker is among
        them."""
        members = [request_id for _, _, request_id in self._state.suspects.get(group, [])]
        for request_id in members[: self._capacity.requests + self._settings.look_ahead + 1]:
            record = self._state.records[request_id]
            if not self._wants_more:
                break
            if self._is_cancelled(record) or self._choice.has_room_for(record):
                self._take(record, "")
        self._state.confined[self._worker] = group, self._expires_at

    def _is_cancelled(self, record: Record) -> bool:
        return self._state.tombstoned(record.item.id, self._now)

    def _take(self, record: Record, lane: str) -> bool:
        """False when it was cancelled meanwhile."""
        if self._is_cancelled(record):
            self._state.answer_cancelled(record, self._now)
            return False
        cost, item = self._choice.take(record, lane), record.item
        charge = cost.tokens / item.weight
        self._state.counters[item.request_class].hold(item.tenant, charge)
        self._state.remove_ready(record)
        record.state, record.token, record.worker = "leased", self._token, self._worker
        record.expires_at = self._expires_at
        record.charge, record.predicted = charge, cost.predicted
        record.passes, record.holder, record.held_until = 0, "", 0.0
        self._taken.append(record)
        return True
