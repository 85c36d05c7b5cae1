"""Loops that go on, whatever a step meets."""

from __future__ import annotations

import asyncio

import pytest

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


async def test_an_unexpected_error_ends_every_loop_even_one_that_loses_its_cancellation() -> None:
    stop, going_on = asyncio.Event(), 0

    async def fails() -> None:
        raise KeyError("a fault of ours")

    async def loses_cancellations() -> None:
        nonlocal going_on
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:  # as Python 3.11's wait_for does when its time has come
            going_on = 1
            return
        going_on += bool(going_on)
        assert going_on < 20

    async def run_both() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(endure("other", stop, loses_cancellations))
            await asyncio.sleep(0)
            group.create_task(endure("test", stop, fails))

    with pytest.raises(ExceptionGroup) as raised:
        await run_both()
    assert [type(error) for error in raised.value.exceptions] == [KeyError]
    assert going_on == 1
