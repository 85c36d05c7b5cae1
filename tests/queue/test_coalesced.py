"""What is asked at the same time is asked together."""

import asyncio

import pytest

from worker.queue.coalesced import Coalesced


class Square:
    def __init__(self):
        self.calls = []
        self.called = asyncio.Event()
        self.gate = asyncio.Event()

    async def __call__(self, keys):
        self.calls.append(list(keys))
        self.called.set()
        await self.gate.wait()
        if -1 in keys:
            raise ValueError("negative")
        return {key: key * key for key in keys if key < 100}


async def test_questions_gather_while_one_is_on_its_way():
    square = Square()
    squares = Coalesced(square, most=3)
    first = [asyncio.create_task(squares.get(key)) for key in (1, 2, 2)]
    await square.called.wait()
    rest = [asyncio.create_task(squares.get(key)) for key in (3, 4, 5, 2, 100)]
    await asyncio.sleep(0)
    square.gate.set()
    assert await asyncio.gather(*first, *rest) == [1, 4, 4, 9, 16, 25, 4, None]
    assert square.calls == [[1, 2], [3, 4, 5], [2, 100]]


async def test_one_who_goes_takes_nothing_from_the_others():
    square = Square()
    squares = Coalesced(square, most=3)
    staying, going = (asyncio.create_task(squares.get(7)) for _ in range(2))
    await asyncio.sleep(0)
    going.cancel()
    square.gate.set()
    assert await staying == 49
    with pytest.raises(asyncio.CancelledError):
        await going


async def test_a_failure_is_everybodys_and_the_next_call_goes_on():
    square = Square()
    square.gate.set()
    squares = Coalesced(square, most=2)
    answers = await asyncio.gather(
        *(squares.get(key) for key in (-1, 1, 2)), return_exceptions=True
    )
    assert [type(answer) for answer in answers] == [ValueError, ValueError, int]
    assert await squares.get(3) == 9
