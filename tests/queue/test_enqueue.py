"""What enters the queue, what stays known, and what leaves it."""

import asyncio

import msgspec

from worker.protocol.types import Capacity
from worker.queue.base import ClassDepth

ROOMY = Capacity(kv_tokens=100_000, adapter_rank=1000, requests=100)


def later(request, **changes):
    return msgspec.structs.replace(request, attempt=request.attempt + 1, **changes)


async def test_the_same_attempt_is_queued_once(queue, make):
    request = make()
    assert await queue.enqueue([request, request]) == ["enqueued", "duplicate"]
    assert await queue.enqueue([request]) == ["duplicate"]
    assert len(await queue.claim("w", ROOMY)) == 1


async def test_an_older_attempt_never_replaces_a_newer_one(queue, make):
    request = make()
    assert await queue.enqueue([later(request)]) == ["enqueued"]
    assert await queue.enqueue([request]) == ["duplicate"]
    (lease,) = await queue.claim("w", ROOMY)
    assert lease.request == later(request)


async def test_a_newer_attempt_replaces_one_that_waits(queue, make):
    request = make()
    await queue.enqueue([request])
    assert await queue.enqueue([later(request, request_class="interactive")]) == ["enqueued"]
    assert (await queue.depth())["batch"] == ClassDepth(ready=0, leased=0)
    assert [one.request.attempt for one in await queue.claim("w", ROOMY)] == [2]


async def test_a_newer_attempt_takes_the_lease_of_the_older(queue, make, answer):
    request = make()
    await queue.enqueue([request])
    (old,) = await queue.claim("w", ROOMY)
    assert await queue.enqueue([later(request)]) == ["enqueued"]
    (new,) = await queue.claim("w2", ROOMY)
    assert not await queue.finish(old, answer(old))
    assert (await queue.renew("w", [old])).lost == (request.request_id,)
    assert await queue.finish(new, answer(new))


async def test_a_request_comes_back_whole(queue, make):
    request = make(cache_scope="s", weight=0.1, order=2.5, deadline=5e9, stream=True)
    await queue.enqueue([request])
    (lease,) = await queue.claim("w", ROOMY)
    assert lease.request == request
    assert lease.worker == "w"
    assert len(bytes.fromhex(lease.token)) == 16


async def test_records_are_known_until_they_are_forgotten(queue, make, answer):
    ready, leased, finished = make(), make(), make()
    await queue.enqueue([finished, leased])
    first, second = await queue.claim("w", ROOMY)
    await queue.finish(first, answer(first))
    await queue.enqueue([ready])
    ids = [one.request_id for one in (ready, leased, finished)]
    assert await queue.known([*ids, "never"]) == [True, True, True, False]
    await queue.forget([*ids, "never"])
    assert await queue.known(ids) == [False, False, False]
    assert (await queue.renew("w", [second])).lost == (leased.request_id,)
    assert await queue.claim("w", ROOMY) == []


async def test_a_forgotten_request_may_be_queued_again(queue, make):
    request = make()
    await queue.enqueue([request])
    await queue.forget([request.request_id])
    assert await queue.enqueue([request]) == ["enqueued"]


async def test_depth_counts_by_class(queue, make):
    await queue.enqueue([make(), make(), make(request_class="interactive")])
    await queue.claim("w", Capacity(100_000, 0, requests=2))
    depth = await queue.depth()
    assert depth == {
        "interactive": ClassDepth(ready=0, leased=1),
        "standard": ClassDepth(ready=0, leased=0),
        "batch": ClassDepth(ready=1, leased=1),
    }


async def test_nothing_is_asked_with_no_ids(queue):
    assert await queue.enqueue([]) == []
    assert await queue.known([]) == []
    assert await queue.cancel([]) == []
    await queue.forget([])
    assert await queue.claim("w", ROOMY) == []


async def test_many_requests_in_one_call(queue, make):
    requests = [make() for _ in range(450)]
    assert set(await queue.enqueue(requests)) == {"enqueued"}
    leases = await queue.claim("w", Capacity(10**9, 0, requests=450))
    assert [one.request for one in leases] == requests


async def test_the_epoch_changes_only_with_the_servers_data(world, queue):
    first = await queue.epoch()
    assert await queue.epoch() == first
    assert await world.queue().epoch() == first
    await world.flush()
    assert await queue.epoch() != first


async def test_a_flush_loses_everything_and_stops_nothing(world, queue, events, make, answer):
    request = make()
    await queue.enqueue([request])
    (lease,) = await queue.claim("w", ROOMY)
    await world.flush()
    assert await queue.known([request.request_id]) == [False]
    assert not await queue.finish(lease, answer(lease))
    assert await events.read("c", 10, 0) == []
    assert await queue.enqueue([later(request)]) == ["enqueued"]
    (again,) = await queue.claim("w", ROOMY)
    assert await queue.finish(again, answer(again))
    assert len(await events.read("c", 10, 0)) == 1


async def test_an_unreadable_request_is_a_dead_letter_and_no_loop(world, queue, make):
    bad, good = make(), make()
    await queue.enqueue([bad, good])
    await world.corrupt(bad.request_id)
    assert [one.request for one in await queue.claim("w", ROOMY)] == [good]
    (letter,) = await queue.dead_letters()
    assert (letter.kind, letter.request_id) == ("request", bad.request_id)
    assert "version 255" in letter.reason
    assert letter.data == b"\xff\x80"
    assert await queue.claim("w", ROOMY) == []
    assert (await queue.depth())["batch"] == ClassDepth(ready=0, leased=1)
    assert await queue.known([bad.request_id]) == [True]
    assert await queue.reap() == []
    assert await queue.enqueue([bad]) == ["duplicate"]
    assert await queue.enqueue([later(bad)]) == ["enqueued"]


async def test_those_that_wait_for_work_are_told(world, queue, make):
    idle, busy = world.queue(), world.queue()
    for one in (idle, busy):
        await one.arrivals(0)
    waiting = asyncio.create_task(idle.arrivals(20))
    request = make()
    await queue.enqueue([request])
    assert await waiting
    assert await busy.arrivals(20)  # though it did not wait at that moment
    assert not await busy.arrivals(0)
    (lease,) = await queue.claim("w", ROOMY)
    await queue.release(lease)
    assert await busy.arrivals(20)
    await queue.enqueue([request])  # a duplicate
    assert not await busy.arrivals(0.01)
