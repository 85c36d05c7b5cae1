"""Waiting for rings of the completion bell."""

from __future__ import annotations

import asyncio


class EventWaiter:
    """A Waiter over one asyncio.Event."""

    def __init__(self) -> None:
        self.rung = asyncio.Event()

    async def wait(self, timeout: float) -> bool:
        try:
            async with asyncio.timeout(timeout):
                await self.rung.wait()
        except TimeoutError:
            return False
        self.rung.clear()
        return True
