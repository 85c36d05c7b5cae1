"""The circuit breaker of an endpoint, as data: closed, open until `paused_until`, then half open
(one delivery at once) until one succeeds."""

from __future__ import annotations

from dataclasses import dataclass, replace

FIRST_PAUSE_MS = 60_000
LONGEST_PAUSE_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class Health:
    """`failures` are in a row, the first one at `failing_since`."""

    failures: int = 0
    failing_since: int | None = None
    paused_until: int | None = None


def after_success() -> Health:
    return Health()


def after_failure(health: Health, now: int, threshold: int, retry_after_ms: int | None) -> Health:
    """What was on its way when the breaker opened says nothing new. A receiver that asks for
    time (`Retry-After`) is left alone for as long, at most for the longest pause."""
    asked = min(retry_after_ms or 0, LONGEST_PAUSE_MS)
    if health.paused_until is not None and now < health.paused_until:
        return replace(health, paused_until=max(health.paused_until, now + asked))
    failures = health.failures + 1
    doublings = failures - threshold
    pause = 0 if doublings < 0 else min(FIRST_PAUSE_MS << min(doublings, 16), LONGEST_PAUSE_MS)
    pause = max(pause, asked)
    since = now if health.failing_since is None else health.failing_since
    return Health(failures, since, now + pause if pause else None)


def room(failures: int, threshold: int, most: int) -> int:
    """How many deliveries may be on their way at once."""
    return most if failures < threshold else 1
