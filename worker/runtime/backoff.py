"""Waiting for a server that is away: longer each time, never in step with other workers."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """Doubles from `first` to `most` seconds, each shortened by up to half at random."""

    first: float = 0.1
    most: float = 5.0
    failures: int = 0

    def next(self) -> float:
        delay = min(self.first * 2.0 ** min(self.failures, 16), self.most)
        self.failures += 1
        return delay * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self.failures = 0
