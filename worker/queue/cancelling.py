"""Tasks that are to end."""

from __future__ import annotations

import asyncio
from typing import Any


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancels them until they are done: Python 3.11's `wait_for`, under every command to Redis, may
    lose a cancellation. What they raised is of no interest any more."""
    going_on = {task for task in tasks if not task.done()}
    while going_on:
        for task in going_on:
            task.cancel()
        _, going_on = await asyncio.wait(going_on, timeout=0.1)
    await asyncio.gather(*tasks, return_exceptions=True)
