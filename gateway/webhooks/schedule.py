"""When a delivery is tried, as data (https://www.standardwebhooks.com/, "Retries")."""

from __future__ import annotations

_SECOND, _MINUTE, _HOUR = 1_000, 60_000, 3_600_000

DELAYS_MS = (
    0,
    5 * _SECOND,
    5 * _MINUTE,
    30 * _MINUTE,
    2 * _HOUR,
    5 * _HOUR,
    10 * _HOUR,
    14 * _HOUR,
    20 * _HOUR,
    24 * _HOUR,
)
"""Before each attempt, counted from the one before it."""

MOST_TRIES = len(DELAYS_MS)
JITTER = 0.1
LONGEST_RETRY_AFTER_MS = 24 * _HOUR
GIVE_UP_MS = 96 * _HOUR
"""All delays, with room for their jitter and for pauses of the circuit breaker."""


def delay_ms(tries: int, retry_after_ms: int | None, chance: float) -> int | None:
    """From the end of a failed attempt, the `tries`-th, to the next one; None: there is none.

    `chance` in [0, 1) spreads receivers' load. A receiver may ask for later (`Retry-After`),
    never for sooner.
    """
    if tries >= MOST_TRIES:
        return None
    planned = round(DELAYS_MS[tries] * (1 + JITTER * (2 * chance - 1)))
    return max(planned, min(retry_after_ms or 0, LONGEST_RETRY_AFTER_MS))
