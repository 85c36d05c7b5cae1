"""Tombstones, and how those that run learn of them."""

import asyncio

from worker.protocol.messages import Cancelled
from worker.protocol.types import Capacity
from worker.queue.base import ClassDepth, Renewal

ROOMY = Capacity(kv_tokens=100_000, adapter_rank=1000, requests=100)


async def test_a_ready_request_is_answered_at_once(queue, events, make):
    request, other = make(), make()
    await queue.enqueue([request, other])
    assert await queue.cancel([request.request_id]) == [request.request_id]
    (entry,) = await events.read("c", 10, 0)
    assert entry.event == Cancelled(request_id=request.request_id, attempt=1)
    assert [one.request for one in await queue.claim("w", ROOMY)] == [other]
    assert await queue.known([request.request_id]) == [True]
    assert await queue.cancel([request.request_id]) == []
    assert await events.pending() == 1


async def test_ready_requests_are_taken_out_and_running_ones_left(queue, events, make, answer):
    running, ready, other = make(), make(), make()
    await queue.enqueue([running])
    (lease,) = await queue.claim("w", ROOMY)
    await queue.enqueue([ready, other])
    ids = [running.request_id, ready.request_id, "unknown"]
    assert await queue.withdraw(ids) == [ready.request_id]
    assert await queue.known(ids) == [True, False, False]
    assert await events.pending() == 0
    assert await queue.finish(lease, answer(lease))
    assert [one.request for one in await queue.claim("w", ROOMY)] == [other]
    assert await queue.enqueue([ready]) == ["enqueued"], "no tombstone is left"


async def test_a_tombstone_refuses_what_comes_after_it(queue, events, make):
    request = make()
    assert await queue.cancel([request.request_id]) == []
    assert await queue.enqueue([request]) == ["cancelled"]
    assert await queue.known([request.request_id]) == [False]
    await queue.forget([request.request_id])
    assert await queue.enqueue([request]) == ["cancelled"]
    assert await events.pending() == 0


async def test_a_tombstone_expires(world, queue, make):
    request = make()
    await queue.cancel([request.request_id])
    await world.forget_tombstone(request.request_id)
    assert await queue.enqueue([request]) == ["enqueued"]


async def test_claim_checks_tombstones_too(world, queue, events, make):
    request, other = make(), make()
    await queue.enqueue([request, other])
    await world.plant_tombstone(request.request_id)
    assert [one.request for one in await queue.claim("w", ROOMY)] == [other]
    (entry,) = await events.read("c", 10, 0)
    assert entry.event == Cancelled(request_id=request.request_id, attempt=1)
    assert (await queue.depth())["batch"] == ClassDepth(ready=0, leased=1)


async def test_running_work_is_told_by_notice_and_by_renewal(queue, make, answer):
    await queue.enqueue([make(), make()])
    leases = await queue.claim("w", ROOMY)
    ids = [one.request.request_id for one in leases]
    assert await queue.cancellations(0.01) == []
    waiting = asyncio.create_task(queue.cancellations(20))
    assert await queue.cancel(ids) == []
    assert await waiting == ids
    assert await queue.cancellations(0.01) == []
    assert await queue.renew("w", leases) == Renewal(cancelled=tuple(ids))
    event = Cancelled(request_id=ids[0], attempt=1)
    assert await queue.finish(leases[0], event)
    # The answer was there before the news of the cancellation: SQL decides which one counts.
    assert await queue.finish(leases[1], answer(leases[1]))


async def test_every_process_hears_a_notice(world, queue, make):
    await queue.enqueue([make()])
    (lease,) = await queue.claim("w", ROOMY)
    others = [world.queue(), world.queue()]
    for other in others:
        assert await other.cancellations(0.01) == []
    await queue.cancel([lease.request.request_id])
    for other in others:
        assert await other.cancellations(20) == [lease.request.request_id]


async def test_a_cancelled_request_is_not_released_but_answered(queue, events, make):
    await queue.enqueue([make()])
    (lease,) = await queue.claim("w", ROOMY)
    await queue.cancel([lease.request.request_id])
    assert await queue.release(lease)
    (entry,) = await events.read("c", 10, 0)
    assert entry.event == Cancelled(request_id=lease.request.request_id, attempt=1)
    assert await queue.claim("w", ROOMY) == []


async def test_a_cancelled_request_whose_worker_died_is_cancelled(world, queue, events, make):
    await queue.enqueue([make()])
    (lease,) = await queue.claim("w", ROOMY)
    await queue.cancel([lease.request.request_id])
    await world.expire(lease)
    assert await queue.reap() == [lease.request.request_id]
    (entry,) = await events.read("c", 10, 0)
    assert entry.event == Cancelled(request_id=lease.request.request_id, attempt=1)
