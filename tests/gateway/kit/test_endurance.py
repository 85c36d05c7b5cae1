"""Loops that go on, whatever a step meets."""

from __future__ import annotations

import asyncio

from gateway.kit.endurance import endure
from worker.queue.base import QueueUnavailable


async def test_a_step_that_fails_or_hangs_is_followed_by_another() -> None:
    stop, steps = asyncio.Event(), 0

    async def step() -> None:
        nonlocal steps
        steps += 1
        match steps:
            case 1:
                raise QueueUnavailable("away")
            case 2:
                await asyncio.Event().wait()  # for ever
            case _:
                stop.set()

    async with asyncio.timeout(20):
        await endure("test", stop, step, longest=0.05)
    assert steps == 3
