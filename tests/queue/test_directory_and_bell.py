"""Live workers, and the bell that tells waiting clients to look."""

import asyncio

import msgspec
import pytest

from worker.protocol.types import Capacity, WorkerLimits
from worker.queue.base import CapacityInvalid, WorkerInfo


def info(worker, model="m"):
    limits = WorkerLimits(context_tokens=4096, kv_tokens=100_000, adapter_rank=64)
    return WorkerInfo(worker, model, limits, Capacity(90_000, 64, 8, 2, ("red",)))


async def test_announced_workers_are_listed_with_the_servers_time(world):
    directory = world.directory()
    before = await world.now()
    await directory.announce(info("w1"))
    await directory.announce(info("w2", "other"))
    live = await world.directory().workers()
    assert [msgspec.structs.replace(one, seen_at=0.0) for one in live] == [
        info("w1"),
        info("w2", "other"),
    ]
    after = await world.now()
    assert all(before <= one.seen_at <= after for one in live)


async def test_a_worker_announces_anew(world):
    directory = world.directory()
    await directory.announce(info("w"))
    busier = msgspec.structs.replace(info("w"), free=Capacity(1, 0, 0, 9))
    await directory.announce(busier)
    (live,) = await directory.workers()
    assert live.free == busier.free


@pytest.mark.parametrize("name", ["context_tokens", "kv_tokens", "adapter_rank"])
async def test_impossible_limits_are_refused(world, name):
    nonsense = msgspec.structs.replace(info("w").limits, **{name: -1})
    with pytest.raises(CapacityInvalid, match=name):
        await world.directory().announce(msgspec.structs.replace(info("w"), limits=nonsense))
    assert await world.directory().workers() == []


async def test_retired_and_vanished_workers_are_not_listed(world):
    directory = world.directory()
    for worker in ("stays", "retires", "vanishes"):
        await directory.announce(info(worker))
    await directory.retire("retires")
    await directory.retire("never was")
    await world.vanish("vanishes")
    assert [one.worker for one in await directory.workers()] == ["stays"]


async def test_the_bell_wakes_those_that_listen(world):
    async with world.bell().listen("a") as a, world.bell().listen("b") as b:
        await world.bell().ring(["a", "c"])
        assert await a.wait(20)
        assert not await b.wait(0.01)


async def test_a_ring_between_listening_and_waiting_is_not_missed(world):
    bell = world.bell()
    async with bell.listen("a") as first, bell.listen("a") as second:
        await bell.ring(["a"])
        assert await first.wait(20)
        assert await second.wait(20)
        assert not await first.wait(0)
        await bell.ring(["a"])
        assert await first.wait(20)


async def test_a_bell_may_be_listened_to_again(world):
    bell = world.bell()
    for _ in range(2):
        async with bell.listen("a") as waiter:
            waiting = asyncio.create_task(waiter.wait(20))
            await bell.ring(["a"])
            assert await waiting
    await bell.ring([])
