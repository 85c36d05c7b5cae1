"""How long requests spend in each phase of their life, as histograms.

added ──queue──> first computed ──prefill──> first token ──decode──> finished
  └───────────────────────────────── e2e ─────────────────────────────────┘
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Literal

from worker.protocol.types import ComputeTimes

Phase = Literal["queue", "prefill", "decode", "e2e"]
PHASES: tuple[Phase, ...] = ("queue", "prefill", "decode", "e2e")

BOUNDS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    *(120.0, 300.0, 600.0, 1800.0),
)
"""Upper bounds of the histograms' buckets, in seconds; a last bucket has none."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """`counts[i]` observations lay in (`BOUNDS[i - 1]`, `BOUNDS[i]`]; `total` is their sum."""

    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0


@dataclass(slots=True)
class RequestTimes:
    """Seconds of the engine's clock. A preempted request keeps its first times."""

    added: float
    computed: float | None = None
    answered: float | None = None

    def computing(self, now: float) -> ComputeTimes:
        """Of a request whose last token has just come."""
        if self.computed is None or self.answered is None:
            raise ValueError("a request finished before its first token")
        return ComputeTimes(self.answered - self.computed, now - self.answered)


@dataclass(slots=True)
class Latencies:
    """Histograms that grow; `snapshot` is one moment of them."""

    _counts: dict[Phase, list[int]] = field(
        default_factory=lambda: {phase: [0] * (len(BOUNDS) + 1) for phase in PHASES}
    )
    _totals: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def finished(self, times: RequestTimes, now: float) -> None:
        """A request that was computed and answered has its last token."""
        computing = times.computing(now)
        whole = now - times.added
        self._observe("queue", whole - computing.prefill - computing.decode)
        self._observe("prefill", computing.prefill)
        self._observe("decode", computing.decode)
        self._observe("e2e", whole)

    def snapshot(self) -> dict[Phase, Histogram]:
        return {
            phase: Histogram(tuple(self._counts[phase]), self._totals[phase]) for phase in PHASES
        }

    def _observe(self, phase: Phase, seconds: float) -> None:
        self._counts[phase][bisect_left(BOUNDS, seconds)] += 1
        self._totals[phase] += seconds
