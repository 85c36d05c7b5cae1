"""Which adapters may join the running ones, so that none waits for ever for rank rows."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from worker.engine.batch import AdapterLoadError, AdapterResidency
from worker.protocol.types import AdapterRef

POLLED = 8


class AdapterGate:
    """Pins, and a queue of blocked adapters.

        blocked ──poll: ready──> held for its waiting sequences ──pin──> running ──unpin──> idle
           └── lacks rows for `drain_after` steps: drain

    A blocked adapter (loading, or no rows for it) delays nobody else. Once ready it is held (a
    pin of our own) until a sequence runs with it: otherwise the next load could take its rows
    before it was ever used. The oldest blocked adapter that lacked rows for `drain_after` steps
    is drained for: enough running adapters, those with the fewest sequences, get no new ones,
    and no other adapter may become pinned until it is ready.
    """

    def __init__(self, residency: AdapterResidency, drain_after: int) -> None:
        self.residency = residency
        self._drain_after = drain_after
        self._pins: Counter[str] = Counter()
        self._held: set[str] = set()
        self._blocked: dict[str, tuple[AdapterRef, int]] = {}
        self._pinned: dict[str, AdapterRef] = {}
        self._turn = 0
        self._target: AdapterRef | None = None
        self._drained: frozenset[str] = frozenset()

    @property
    def target(self) -> AdapterRef | None:
        """The adapter that others are drained for."""
        return self._target

    def is_pinned(self, digest: str) -> bool:
        return digest in self._pinned

    def is_blocked(self, digest: str) -> bool:
        return digest in self._blocked

    def admits(self, adapter: AdapterRef, step: int) -> bool:
        """Whether a sequence may start with it now; else it counts as blocked from here on.

        Raises AdapterLoadError.
        """
        if adapter.digest in self._blocked:
            return False
        if self._allowed(adapter) and self._ready(adapter):
            return True
        self._blocked[adapter.digest] = adapter, step
        return False

    def pin(self, adapter: AdapterRef) -> None:
        """One more running sequence."""
        digest = adapter.digest
        self.residency.pin(adapter)
        self._pins[digest] += 1
        self._pinned[digest] = adapter
        self._let_go(adapter)

    def unpin(self, adapter: AdapterRef) -> None:
        digest = adapter.digest
        self.residency.unpin(adapter)
        self._pins[digest] -= 1
        if not self._pins[digest]:
            del self._pins[digest]
            if digest not in self._held:
                del self._pinned[digest]

    def _let_go(self, adapter: AdapterRef) -> None:
        if adapter.digest in self._held:
            self._held.discard(adapter.digest)
            self.residency.unpin(adapter)
            if not self._pins[adapter.digest]:
                del self._pinned[adapter.digest]

    def forget(self, adapter: AdapterRef) -> None:
        """Nobody waits for it any more."""
        self._blocked.pop(adapter.digest, None)
        self._let_go(adapter)
        if self._target == adapter:
            self._end_drain()

    def poll(self, step: int) -> tuple[list[AdapterRef], list[tuple[AdapterRef, AdapterLoadError]]]:
        """Ask again for the oldest blocked adapters, and for some of the others in turn.

        Returns those that became ready (held now) and those that failed; neither is blocked
        any more.
        """
        ready: list[AdapterRef] = []
        failed: list[tuple[AdapterRef, AdapterLoadError]] = []
        for adapter in self._candidates():
            if not self._allowed(adapter):
                continue
            try:
                if not self._ready(adapter):
                    continue
                self._hold(adapter)
                ready.append(adapter)
            except AdapterLoadError as error:
                failed.append((adapter, error))
            self._blocked.pop(adapter.digest)
        for adapter, _ in failed:
            self.forget(adapter)
        self._choose_drain(step)
        return ready, failed

    def _candidates(self) -> list[AdapterRef]:
        count = len(self._blocked)
        oldest = [adapter for adapter, _ in islice(self._blocked.values(), POLLED)]
        if count <= POLLED:
            return oldest
        start = POLLED + self._turn % (count - POLLED)
        self._turn += POLLED
        others = islice(self._blocked.values(), start, start + POLLED)
        return oldest + [adapter for adapter, _ in others]

    def _ready(self, adapter: AdapterRef) -> bool:
        return adapter.digest in self._pinned or self.residency.prepare(adapter)

    def _hold(self, adapter: AdapterRef) -> None:
        if adapter.digest not in self._pinned:
            self.residency.pin(adapter)
            self._held.add(adapter.digest)
            self._pinned[adapter.digest] = adapter
        if self._target == adapter:
            self._end_drain()

    def _allowed(self, adapter: AdapterRef) -> bool:
        if self._target is None or adapter == self._target:
            return True
        return adapter.digest in self._pinned and adapter.digest not in self._drained

    def _choose_drain(self, step: int) -> None:
        if self._target is not None:
            return
        for adapter, since in islice(self._blocked.values(), POLLED):
            missing = adapter.rank - self.residency.free_rank()
            if missing > 0 and step - since >= self._drain_after:
                self._target = adapter
                self._drained = self._victims(missing)
                for digest in self._drained & self._held:
                    self._let_go(self._pinned[digest])
                return

    def _victims(self, missing: int) -> frozenset[str]:
        chosen: list[str] = []
        for digest in sorted(self._pinned, key=lambda digest: self._pins[digest]):
            if missing <= 0:
                break
            chosen.append(digest)
            missing -= self._pinned[digest].rank
        return frozenset(chosen)

    def _end_drain(self) -> None:
        self._target, self._drained = None, frozenset()
