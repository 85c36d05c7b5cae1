"""Waits until a request has ended: the bell is a hint, SQL is the truth.

However many wait, those that look at the same time share one query, and those that were not
rung look at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from sqlalchemy import select

from gateway.kit.context import Context
from gateway.kit.database import ReadSession
from gateway.models import Request
from gateway.models.request import is_open
from worker.protocol.types import RequestId

_LOOK_EVERY = 5.0


async def wait_for_end(context: Context, request_id: str, seconds: float) -> bool:
    """False when it is still open after `seconds`. A ring may be lost, so SQL is read again
    every few seconds."""
    deadline = time.monotonic() + seconds
    async with context.queues.bell.listen(RequestId(request_id)) as waiter:
        while await context.lookups.holds(_open_among, request_id):
            now = time.monotonic()
            if now >= deadline:
                return False
            next_look = _LOOK_EVERY - now % _LOOK_EVERY
            await waiter.wait(min(deadline - now, next_look))
    return True


async def _open_among(session: ReadSession, request_ids: Sequence[str]) -> set[str]:
    rows = await session.scalars(select(Request.id).where(Request.id.in_(request_ids), is_open()))
    return set(rows)
