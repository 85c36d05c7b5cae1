"""When waiting sequences may join the running ones: the three batching modes.

Everything else (memory, adapters, order, execution) is the same in all of them, so that their
costs can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from worker.engine.config import SchedulerConfig


class BatchFormation(Protocol):
    def begin_step(self, running: int, waiting: int) -> None:
        """Called once before a step admits."""

    def is_open(self) -> bool:
        """Whether one more may join now."""

    def joined(self) -> None: ...

    def left(self) -> None:
        """A running sequence was preempted and will have to join again."""


class Continuous:
    """Whoever fits joins at once."""

    def begin_step(self, running: int, waiting: int) -> None:
        pass

    def is_open(self) -> bool:
        return True

    def joined(self) -> None:
        pass

    def left(self) -> None:
        pass


class Static:
    """An empty engine takes at most `size` of those waiting; nobody joins before all are done."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._places = 0

    def begin_step(self, running: int, waiting: int) -> None:
        if not running:
            self._places = min(self.size, waiting)

    def is_open(self) -> bool:
        return self._places > 0

    def joined(self) -> None:
        self._places -= 1

    def left(self) -> None:
        self._places += 1


class Dynamic(Static):
    """As static, but an empty engine starts only once `size` wait or `wait` seconds have gone."""

    def __init__(self, size: int, wait: float, now: Callable[[], float]) -> None:
        super().__init__(size)
        self.wait = wait
        self._now = now
        self._since: float | None = None

    def begin_step(self, running: int, waiting: int) -> None:
        if running:
            return
        if not waiting:
            self._since = None
            return
        if self._since is None:
            self._since = self._now()
        if self._places or waiting >= self.size or self._now() - self._since >= self.wait:
            self._places = min(self.size, waiting)

    def joined(self) -> None:
        super().joined()
        self._since = None


def batch_formation(config: SchedulerConfig, now: Callable[[], float]) -> BatchFormation:
    size = config.batch_size or config.max_sequences
    match config.mode:
        case "continuous":
            return Continuous()
        case "static":
            return Static(size)
        case "dynamic":
            return Dynamic(size, config.batch_wait, now)
