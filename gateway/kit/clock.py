"""Time as the database keeps it: integer milliseconds since the Unix epoch."""

from __future__ import annotations

import time


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def seconds(ms: int | None) -> int | None:
    """Milliseconds as the API shows them: whole Unix seconds."""
    return None if ms is None else ms // 1000
