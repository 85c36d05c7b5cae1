"""Whom a worker's death makes suspects of, and with whom they may run next.

Everything that the worker held is suspect. Its requests are split into two halves, and each half
runs with its own members only: where the cause was the machine, all of them soon answer; where
it was one of them, its half dies again and is halved again. After log2(n) deaths the one is by
itself, and only deaths alone count against a request (decision 0006).
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.kit.ids import new_id


def halved(lost: Sequence[str]) -> dict[str, str]:
    """The next group of each request that one worker's death took: a name that its half shares,
    its own id when it is to run alone."""
    ordered = sorted(set(lost))
    middle = (len(ordered) + 1) // 2
    return _group(ordered[:middle]) | _group(ordered[middle:])


def _group(half: Sequence[str]) -> dict[str, str]:
    return dict.fromkeys(half, half[0] if len(half) == 1 else new_id("suspects"))
