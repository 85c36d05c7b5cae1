"""Waits until a request has ended: the bell is a hint, SQL is the truth."""

from __future__ import annotations

import asyncio
import time

from sqlalchemy import select

from gateway.jobs.states import TERMINAL
from gateway.kit.context import Context
from gateway.models import Request
from worker.protocol.types import RequestId

_LOOK_AGAIN = 5.0


async def wait_for_end(context: Context, request_id: str, seconds: float) -> bool:
    """False when it is still open after `seconds`. A ring may be lost, so SQL is read again
    every few seconds."""
    deadline = time.monotonic() + seconds
    async with context.queues.bell.listen(RequestId(request_id)) as waiter:
        while not await _has_ended(context, request_id):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if not await waiter.wait(min(left, _LOOK_AGAIN)):
                continue
            if await _has_ended(context, request_id):
                return True
            await asyncio.sleep(0.01)  # rung by another attempt's end: do not spin
    return True


async def _has_ended(context: Context, request_id: str) -> bool:
    async with context.database.read() as session:
        state = await session.scalar(select(Request.state).where(Request.id == request_id))
    return state is None or state in TERMINAL
