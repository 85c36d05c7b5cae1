from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from worker.protocol.messages import Finished, GenerateRequest
from worker.protocol.types import RequestId

Make = Callable[..., GenerateRequest]


async def begin(bench, *requests: GenerateRequest) -> None:
    """The engine is in its first step with them, and stays there until the gate opens."""
    bench.runner.entered.clear()
    bench.runner.gate.clear()
    await bench.submit(*requests)
    await asyncio.to_thread(bench.runner.entered.wait, 20)


async def test_a_drain_finishes_what_runs_and_takes_nothing_new(bench, make_request: Make) -> None:
    worker = bench.worker()
    async with bench.running(worker) as task:
        await bench.submit(make_request("running", max_tokens=500))
        await bench.expect(object, of="running")
        bench.stop.press()
        await bench.submit(make_request("late"))
        assert await asyncio.wait_for(task, 20) is True
        await bench.expect(Finished, of="running")
    depth = (await bench.queue.depth())["batch"]
    assert (depth.ready, depth.leased) == (1, 0)


async def test_what_has_not_begun_is_given_back(bench, make_request: Make, until) -> None:
    worker = bench.worker()
    async with bench.running(worker) as task:
        await begin(bench, make_request("waiting"))
        bench.stop.press()

        async def given_back() -> bool:
            return (await bench.queue.depth())["batch"].ready == 1

        await until(given_back)
        bench.runner.gate.set()
        assert await asyncio.wait_for(task, 20) is True
    assert not bench.seen
    (again,) = await bench.queue.claim("other", bench.engine().capacity())
    assert (again.request.request_id, again.request.attempt) == ("waiting", 1)


async def test_the_drain_is_bounded(bench, make_request: Make) -> None:
    bench.drain_seconds = 0.3
    worker = bench.worker()
    async with bench.running(worker) as task:
        bench.runner.failure = lambda batch: bench.runner.pause(0.02)
        await bench.submit(make_request("endless", max_tokens=1000))
        await bench.expect(object, of="endless")
        bench.stop.press()
        assert await asyncio.wait_for(task, 20) is True
    depth = (await bench.queue.depth())["batch"]
    assert (depth.ready, depth.leased) == (1, 0)


async def test_a_second_signal_stops_at_once(bench, make_request: Make) -> None:
    bench.drain_seconds = 600
    worker = bench.worker()
    async with bench.running(worker) as task:
        bench.runner.failure = lambda batch: bench.runner.pause(0.02)
        await bench.submit(make_request("endless", max_tokens=1000))
        await bench.expect(object, of="endless")
        bench.stop.press()
        bench.stop.press()
        assert await asyncio.wait_for(task, 20) is True
    depth = (await bench.queue.depth())["batch"]
    assert (depth.ready, depth.leased) == (1, 0)


async def test_a_worker_ends_though_an_activity_loses_its_cancellation(
    bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, lost = asyncio.Event(), asyncio.Event()

    async def cancellations(timeout: float) -> list[RequestId]:
        waiting.set()
        try:
            await asyncio.sleep(timeout)
        except asyncio.CancelledError:  # as Python 3.11's wait_for does when its time has come
            if lost.is_set():
                raise
            lost.set()
        return []

    monkeypatch.setattr(bench.queue, "cancellations", cancellations)
    async with bench.running(bench.worker()) as task:
        await waiting.wait()
        bench.stop.press()
        assert await asyncio.wait_for(task, 20) is True
    assert lost.is_set()
