from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from worker.engine.batch import ScheduledBatch
from worker.protocol.messages import (
    Cancelled,
    Failed,
    Finished,
    GenerateRequest,
    LeaseLost,
    Started,
)
from worker.protocol.types import AdapterRef, SamplingParams, SharedPrefix
from worker.runtime.loops import Rhythm

Make = Callable[..., GenerateRequest]


async def test_a_claimed_request_is_started_and_finished(bench, make_request: Make, until) -> None:
    worker = bench.worker()
    async with bench.running(worker):
        await bench.submit(make_request(max_tokens=4))
        started, finished = await bench.expect(Started, Finished)
        assert started.worker == "w1"
        assert (finished.usage.prompt, finished.usage.completion) == (3, 4)
        (choice,) = finished.choices
        assert len(choice.text) == len(choice.token_ids) == 4
        assert choice.finish_reason == "length"
        await until(lambda: not len(worker.held))
    depth = await bench.queue.depth()
    assert [(d.ready, d.leased) for d in depth.values()] == [(0, 0)] * 3


async def test_many_requests_are_each_answered_once(bench, make_request: Make) -> None:
    names = [f"r{number}" for number in range(120)]
    async with bench.running(bench.worker(max_sequences=16)):
        await bench.submit(*(make_request(name) for name in names))
        for name in names:
            await bench.expect(Finished, of=name)
    finished = [event.request_id for event in bench.seen if isinstance(event, Finished)]
    assert sorted(finished) == sorted(names)


async def test_no_more_is_claimed_than_the_engine_has_room_for(bench, make_request: Make) -> None:
    worker = bench.worker(max_sequences=8)
    most, admit = 0, worker.admit

    async def counted(leases) -> None:
        nonlocal most
        await admit(leases)
        stats = worker.thread.published.stats
        most = max(most, stats.running + stats.waiting)

    worker.admit = counted
    bench.runner.failure = lambda batch: bench.runner.pause(0.002)
    async with bench.running(worker):
        await bench.submit(*(make_request(f"r{n}", max_tokens=20) for n in range(40)))
        for number in range(40):
            await bench.expect(Finished, of=f"r{number}")
    assert most == 8


async def test_the_same_seed_gives_the_same_text_on_another_worker(
    bench, make_request: Make
) -> None:
    async with bench.running(bench.worker("a")):
        await bench.submit(make_request("r1", sampling=SamplingParams(max_tokens=8, seed=5)))
        (first,) = await bench.expect(Finished, of="r1")
        await bench.submit(make_request("r2", sampling=SamplingParams(max_tokens=8, seed=5)))
        (second,) = await bench.expect(Finished, of="r2")
    assert first.choices == second.choices


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"prompt_ids": ()}, "invalid_request"),
        ({"prompt_ids": tuple(range(64))}, "context_length_exceeded"),
    ],
)
async def test_what_the_engine_refuses_fails_with_its_code(
    bench, make_request: Make, change: dict, code: str
) -> None:
    async with bench.running(bench.worker(context_tokens=64)):
        await bench.submit(make_request(**change))
        (failed,) = await bench.expect(Failed)
    assert (failed.code, failed.retryable) == (code, False)


async def test_an_adapter_beyond_the_rank_pool_is_not_claimed(bench, make_request: Make) -> None:
    """The queue answers with what fits; nothing is taken only to be refused."""
    worker = bench.worker(adapter_rank=64)
    async with bench.running(worker):
        await bench.submit(make_request("big", adapter=AdapterRef("d", 65)))
        await bench.submit(make_request("small"))
        await bench.expect(Finished, of="small")
    assert (await bench.queue.depth())["batch"].ready == 1


async def test_cancelling_a_running_request_stops_it(bench, make_request: Make, until) -> None:
    worker = bench.worker()
    async with bench.running(worker):
        bench.runner.entered.clear()
        bench.runner.gate.clear()
        request = make_request(max_tokens=900)
        await bench.submit(request)
        await asyncio.to_thread(bench.runner.entered.wait, 20)
        assert await bench.queue.cancel([request.request_id]) == []
        await bench.expect(Cancelled)
        bench.runner.gate.set()
        await until(lambda: worker.thread.published.stats.counters.cancelled == 1)
    assert not [event for event in bench.seen if isinstance(event, Finished)]


async def test_leases_are_renewed_while_the_engine_advances(bench, make_request: Make) -> None:
    async with bench.running(bench.worker()) as task:
        bench.runner.failure = lambda batch: bench.runner.pause(0.01)
        await bench.submit(make_request(max_tokens=900))
        await bench.expect(Started)
        renewed = asyncio.get_running_loop().time() + 2 * bench.settings.lease_seconds
        while asyncio.get_running_loop().time() < renewed:
            assert await bench.queue.reap() == []
            await asyncio.sleep(0.1)
        assert not task.done()


async def test_a_stalled_engine_lets_its_leases_expire(bench, make_request: Make, until) -> None:
    worker = bench.worker()
    async with bench.running(worker):
        bench.runner.entered.clear()
        bench.runner.gate.clear()
        request = make_request(max_tokens=900)
        await bench.submit(request)
        await asyncio.to_thread(bench.runner.entered.wait, 20)
        await until(bench.queue.reap)
        (lost,) = await bench.expect(LeaseLost)
        assert lost.worker == "w1"
        bench.runner.gate.set()
        await until(lambda: not len(worker.held))
    assert not [event for event in bench.seen if isinstance(event, Finished)]


async def test_a_lost_lease_stops_the_work_and_says_nothing(
    bench, make_request: Make, until
) -> None:
    """Forgetting a record withdraws its lease; the next renewal tells."""
    worker = bench.worker()
    async with bench.running(worker):
        request = make_request(max_tokens=1000)
        bench.runner.entered.clear()
        bench.runner.gate.clear()
        await bench.submit(request)
        await asyncio.to_thread(bench.runner.entered.wait, 20)
        await bench.queue.forget([request.request_id])
        bench.runner.gate.set()
        await until(lambda: not len(worker.held) and not worker.thread.published.busy)
    assert not [event for event in bench.seen if isinstance(event, Finished)]


async def test_a_crashed_engine_ends_the_worker_and_keeps_its_leases(
    bench, make_request: Make, until
) -> None:
    """They expire: a release would hide a request that kills engines."""

    def poison(batch: ScheduledBatch) -> Exception | None:
        return RuntimeError("device lost")

    worker = bench.worker()
    async with bench.running(worker) as task:
        bench.runner.failure = poison
        suspect = make_request()
        await bench.submit(msgspec.structs.replace(suspect, suspects=suspect.request_id))
        assert await asyncio.wait_for(task, 20) is False
    assert len(worker.held) == 1
    await until(bench.queue.reap)
    (lost,) = await bench.expect(LeaseLost)
    assert lost.alone


async def test_announces_itself_and_retires(bench, until) -> None:
    async with bench.running(bench.worker("here")):
        await until(bench.directory.workers)
        (info,) = await bench.directory.workers()
        assert (info.worker, info.model) == ("here", bench.queue.model)
        assert info.limits.context_tokens == 1024
        assert info.free.requests == 256
    assert await bench.directory.workers() == []


async def test_an_idle_worker_is_woken_by_what_arrives(bench, make_request: Make) -> None:
    subscribed, arrivals = asyncio.Event(), bench.queue.arrivals

    async def noticed(timeout: float) -> bool:
        told = await arrivals(timeout)
        subscribed.set()
        return told

    bench.queue.arrivals = noticed
    rhythm = Rhythm(claim_idle=3600, notice_wait=0.05, lease=bench.settings.lease_seconds)
    async with bench.running(bench.worker(), rhythm):
        await subscribed.wait()
        for name in ("first", "second"):
            await bench.submit(make_request(name))
            await bench.expect(Finished, of=name)


async def test_what_tenants_share_is_found_by_others_and_kept(
    bench, make_request: Make, until
) -> None:
    prompt = tuple(range(20)) * 2
    worker = bench.worker(num_blocks=64, pinned_share=0.1)
    cache = worker.thread._engine.scheduler.blocks.cache
    await bench.prefixes.publish([SharedPrefix(prompt[:32])])
    async with bench.running(worker):
        for tenant, shared, cached in (("a", 32, 0), ("b", 32, 32), ("c", 0, 0)):
            request = make_request(f"of {tenant}", max_tokens=2)
            changes = {"tenant": tenant, "prompt_ids": prompt, "shared_tokens": shared}
            await bench.submit(msgspec.structs.replace(request, cache_scope=tenant, **changes))
            (finished,) = await bench.expect(Finished, of=f"of {tenant}")
            assert finished.usage.cached == cached
        await until(lambda: cache.num_kept == 2)
        await bench.prefixes.publish([])
        await until(lambda: cache.num_kept == 0)
