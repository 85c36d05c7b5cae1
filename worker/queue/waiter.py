"""Waiting for one ring of the completion bell."""

from __future__ import annotations

import asyncio


class EventWaiter:
    """A Waiter over one asyncio.Event."""

    def __init__(self) -> None:
        self.rung = asyncio.Event()

    async def wait(self, timeout: float) -> bool:
        try:
            await asyncio.wait_for(self.rung.wait(), timeout)
        except TimeoutError:
            return False
        return True
