"""Which adapters may join the running ones, so that none waits for ever for rank rows."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from worker.engine.batch import AdapterLoadError, AdapterResidency
from worker.protocol.types import AdapterRef

POLLED = 64
"""Oldest blocked adapters looked at in each step."""

DRAIN_PATIENCE = 64
"""Steps that a drain goes on after its victims are gone. A load that was under way when it
began may need the rows and our asking to come to its end."""


class AdapterGate:
    """Pins, and a queue of blocked adapters.

        blocked ──poll: ready──> held for its waiting sequences ──pin──> running ──unpin──> idle
           └── lacks rows for `drain_after` steps: drain

    A blocked adapter (loading, or no rows for it) delays nobody else. Adapters are asked for in
    the order in which they were blocked, and together only as many as the unpinned rows hold:
    otherwise loads would take each other's rows for ever. One that its store does not give at
    present is passed over. Once ready, an adapter is held (a pin of our own) until a sequence runs
    with it: no load is for nothing.

    The oldest blocked adapter that lacked rows for `drain_after` steps is drained for: enough
    pinned adapters, those with the fewest sequences, get no new ones (held ones their first
    only), and no other adapter becomes pinned until it is ready or DRAIN_PATIENCE has run out. For
    one that lacks other memory, whose holders aren't known here, all are drained.
    """

    def __init__(self, residency: AdapterResidency, rank: int, drain_after: int) -> None:
        self.residency = residency
        self._rank = rank
        self._drain_after = drain_after
        self._pins: Counter[str] = Counter()
        self._held: set[str] = set()
        self._blocked: dict[str, tuple[AdapterRef, int]] = {}
        self._pinned: dict[str, AdapterRef] = {}
        self._target: AdapterRef | None = None
        self._drained: frozenset[str] = frozenset()
        self._patience = 0

    @property
    def target(self) -> AdapterRef | None:
        """The adapter that others are drained for."""
        return self._target

    def free_rank(self) -> int:
        """Rows not pinned here. Unlike the residency's number it counts rows that are loading,
        which their adapters would otherwise seem to lack."""
        return self._rank - sum(adapter.rank for adapter in self._pinned.values())

    def is_pinned(self, digest: str) -> bool:
        return digest in self._pinned

    def admits(self, adapter: AdapterRef, step: int) -> bool:
        """Whether a sequence may start with it now; else it counts as blocked from here on.

        Raises AdapterLoadError.
        """
        if adapter.digest in self._blocked:
            return False
        if self._allowed(adapter):
            if adapter.digest in self._pinned:
                return True
            if not self._blocked and self.residency.prepare(adapter):
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
        """Ask again for blocked adapters.

        Returns those that became ready (held now) and those that failed; neither is blocked
        any more.
        """
        ready: list[AdapterRef] = []
        failed: list[tuple[AdapterRef, AdapterLoadError]] = []
        for adapter in self._asked():
            try:
                if self.residency.prepare(adapter):
                    ready.append(adapter)
                    self._hold(adapter)
            except AdapterLoadError as error:
                failed.append((adapter, error))
        for adapter in ready:
            del self._blocked[adapter.digest]
        for adapter, _ in failed:
            self.forget(adapter)
        self._choose_drain(step)
        return ready, failed

    def _asked(self) -> list[AdapterRef]:
        asked: list[AdapterRef] = []
        if not self._blocked:
            return asked
        room = self.free_rank()
        for adapter, since in list(islice(self._blocked.values(), POLLED)):
            if self.residency.is_away(adapter):
                del self._blocked[adapter.digest]
                self._blocked[adapter.digest] = adapter, since  # others come before it
                continue
            pinned = adapter.digest in self._pinned
            if self._allowed(adapter) and (pinned or adapter.rank <= room):
                asked.append(adapter)
                room -= 0 if pinned else adapter.rank
        return asked

    def _hold(self, adapter: AdapterRef) -> None:
        if adapter.digest not in self._pinned:
            self.residency.pin(adapter)
            self._held.add(adapter.digest)
            self._pinned[adapter.digest] = adapter
        if self._target == adapter:
            self._end_drain()

    def _allowed(self, adapter: AdapterRef) -> bool:
        if self._target is None or adapter == self._target or adapter.digest in self._held:
            return True
        return adapter.digest in self._pinned and adapter.digest not in self._drained

    def _choose_drain(self, step: int) -> None:
        if self._target is not None:
            self._keep_draining(self._target, step)
            return
        for adapter, since in islice(self._blocked.values(), POLLED):
            if step - since < self._drain_after:
                continue
            if self.residency.is_away(adapter):
                continue
            missing = adapter.rank - self.free_rank()
            if self.residency.lacks_memory(adapter):
                missing = self._rank
            if missing > 0:
                self._target, self._patience = adapter, DRAIN_PATIENCE
                self._drained = self._victims(missing)
                return

    def _keep_draining(self, target: AdapterRef, step: int) -> None:
        if self.residency.is_away(target):
            self._end_drain()
            return
        if not self._drained.isdisjoint(self._pinned):
            return
        self._patience -= 1
        if not self._patience:
            self._blocked[target.digest] = target, step
            self._end_drain()

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
