"""Where a request stands among its tenant's: earliest first, and neighbours share a prefix.

`sort_key` = due time in seconds, then a digest of (adapter, instructions), then the line. Batch
lines are due when their window ends, so the batch that ends first runs first; jobs are due when
they arrive. The queue orders by one number, made of the first two parts.
"""

from __future__ import annotations

import hashlib

_GROUP_DIGITS = 5


def sort_key(due_ms: int, adapter_revision_id: str | None, prefix: str, line_no: int = 0) -> str:
    group = hashlib.blake2b(f"{adapter_revision_id or ''}\n{prefix}".encode()).hexdigest()
    return f"{due_ms // 1000:012d}:{group[:_GROUP_DIGITS]}:{line_no:08d}"


def queue_order(key: str) -> float:
    due, group, _line = key.split(":")
    return int(due) + int(group, 16) / float(16**_GROUP_DIGITS)
