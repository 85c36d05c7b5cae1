"""Sequences that do not run: in line, or parked until something they need has come."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Iterator
from itertools import count

from worker.engine.sequence import Sequence
from worker.protocol.types import AdapterRef


class WaitingQueue:
    """A line ordered by class and arrival, with parking lots beside it.

    A sequence that cannot start for a reason of its own (its adapter loads, its prefix is being
    computed) is parked under that reason, so that a step never looks at it again until the
    reason is gone. All operations cost O(log n); `unpark` O(log n) for each one unparked.

    Classes are told apart by a head start, not absolutely: a sequence of priority p stands where
    one of priority 0 would that arrived p · `headstart` later. No stream of urgent requests can
    keep one waiting for ever.
    """

    def __init__(self, headstart: int) -> None:
        self._headstart = headstart
        self._line: list[tuple[int, int, int, int, Sequence]] = []
        self._serial = count()
        self._lot_of: dict[Sequence, Hashable | None] = {}
        self._lots: dict[Hashable, dict[Sequence, None]] = {}
        self._adapters: Counter[AdapterRef] = Counter()

    def __len__(self) -> int:
        return len(self._lot_of)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._lot_of

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._lot_of)

    def adapters(self) -> tuple[AdapterRef, ...]:
        """The different adapters that somebody waits for."""
        return tuple(self._adapters)

    def wants(self, adapter: AdapterRef) -> bool:
        return adapter in self._adapters

    def add(self, sequence: Sequence) -> None:
        if sequence.adapter is not None:
            self._adapters[sequence.adapter] += 1
        self._line_up(sequence)

    def head(self) -> Sequence | None:
        """First in line, parked ones left out."""
        line, lot_of = self._line, self._lot_of
        while line and lot_of.get(line[0][-1], line) is not None:
            heapq.heappop(line)
        return line[0][-1] if line else None

    def remove(self, sequence: Sequence) -> None:
        """Take a waiting sequence out, wherever it stands. Raises KeyError if it does not wait.

        Its place in line is cleared lazily.
        """
        self._leave_lot(sequence)
        del self._lot_of[sequence]
        adapter = sequence.adapter
        if adapter is not None:
            self._adapters[adapter] -= 1
            if not self._adapters[adapter]:
                del self._adapters[adapter]

    def park(self, sequence: Sequence, reason: Hashable) -> None:
        """Out of the line, into the lot of `reason`."""
        self._leave_lot(sequence)
        self._lot_of[sequence] = reason
        self._lots.setdefault(reason, {})[sequence] = None

    def unpark(self, reason: Hashable) -> None:
        """Everybody in the lot of `reason` gets in line again."""
        for sequence in self._lots.pop(reason, ()):
            self._line_up(sequence)

    def parked(self, reason: Hashable) -> tuple[Sequence, ...]:
        return tuple(self._lots.get(reason, ()))

    def reason(self, sequence: Sequence) -> Hashable | None:
        """Why a sequence is parked. None when it stands in line or does not wait."""
        return self._lot_of.get(sequence)

    def _line_up(self, sequence: Sequence) -> None:
        self._lot_of[sequence] = None
        place = sequence.arrival + sequence.priority * self._headstart
        entry = place, sequence.arrival, sequence.choice, next(self._serial), sequence
        heapq.heappush(self._line, entry)

    def _leave_lot(self, sequence: Sequence) -> None:
        reason = self._lot_of[sequence]
        if reason is None:
            return
        lot = self._lots[reason]
        del lot[sequence]
        if not lot:
            del self._lots[reason]
