"""How long to wait before a process that ended is started again."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_SECONDS = 0.5
MOST_SECONDS = 10.0
STABLE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Backoff:
    """`failures` in a row: each shorter than a stable run."""

    failures: int = 0

    def after(self, ran_seconds: float) -> Backoff:
        """The state after a run of `ran_seconds` ended."""
        return Backoff(1 if ran_seconds >= STABLE_SECONDS else self.failures + 1)

    @property
    def delay(self) -> float:
        if self.failures == 0:
            return 0.0
        return min(FIRST_SECONDS * 2.0 ** min(self.failures - 1, 10), MOST_SECONDS)
