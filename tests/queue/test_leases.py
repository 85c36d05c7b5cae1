"""Who may say what about a request it holds, and what becomes of a worker that is gone."""

import msgspec
import pytest

from worker.protocol.messages import Cancelled, Delta, Failed, LeaseLost, Started
from worker.protocol.types import Capacity
from worker.queue.base import ClassDepth, Renewal
from worker.queue.settings import QueueSettings

ROOMY = Capacity(kv_tokens=100_000, adapter_rank=1000, requests=100)


@pytest.fixture
async def lease(queue, make):
    await queue.enqueue([make()])
    (lease,) = await queue.claim("w", ROOMY)
    return lease


def forged(lease):
    return msgspec.structs.replace(lease, token="0" * 32)


def started(lease):
    return Started(request_id=lease.request.request_id, attempt=1, worker="w")


async def read_events(events):
    return [entry.event for entry in await events.read("c", 100, 0)]


async def test_a_lease_lasts_as_set_by_the_servers_clock(world, make):
    queue = world.queue(QueueSettings(lease_seconds=7))
    await queue.enqueue([make()])
    before = await world.now()
    (lease,) = await queue.claim("w", ROOMY)
    assert before + 7 <= lease.expires_at <= await world.now() + 7


async def test_finish_appends_the_event_and_drops_the_lease(queue, events, lease, answer):
    assert await queue.finish(lease, answer(lease))
    assert await read_events(events) == [answer(lease)]
    assert (await queue.depth())["batch"] == ClassDepth(ready=0, leased=0)
    assert (await queue.renew("w", [lease])).lost == (lease.request.request_id,)
    assert await queue.reap() == []


async def test_finish_repeated_says_yes_and_appends_nothing(queue, events, lease, answer):
    assert await queue.finish(lease, answer(lease))
    assert await queue.finish(lease, answer(lease))
    assert await events.pending() == 1


async def test_whoever_cannot_show_the_token_changes_nothing(queue, events, lease, answer):
    thief = forged(lease)
    assert not await queue.emit(thief, started(lease))
    assert not await queue.finish(thief, answer(lease))
    assert not await queue.release(thief)
    assert await queue.renew("w", [thief]) == Renewal(lost=(lease.request.request_id,))
    assert await events.pending() == 0
    assert await queue.finish(lease, answer(lease))


async def test_each_claim_has_its_own_token(queue, make):
    await queue.enqueue([make(), make()])
    one = Capacity(100_000, 0, requests=1)
    (first,), (second,) = await queue.claim("w", one), await queue.claim("w", one)
    assert first.token != second.token


async def test_a_failure_is_an_answer_too(queue, events, lease):
    event = Failed(
        request_id=lease.request.request_id, attempt=1, code="engine_error", message="no"
    )
    assert await queue.finish(lease, event)
    assert await read_events(events) == [event]


async def test_an_expired_lease_is_told_to_the_collector(world, queue, events, lease, answer):
    await world.expire(lease)
    assert await queue.reap() == [lease.request.request_id]
    assert await read_events(events) == [
        LeaseLost(request_id=lease.request.request_id, attempt=1, worker="w")
    ]
    assert await queue.reap() == []
    assert await queue.known([lease.request.request_id]) == [True]
    assert await queue.claim("w2", ROOMY) == []
    assert not await queue.finish(lease, answer(lease))
    assert not await queue.release(lease)


async def test_after_a_lost_lease_the_next_attempt_is_queued(world, queue, lease, answer):
    await world.expire(lease)
    await queue.reap()
    assert await queue.enqueue([lease.request]) == ["duplicate"]
    again = msgspec.structs.replace(lease.request, attempt=2, suspects="half")
    assert await queue.enqueue([again]) == ["enqueued"]
    (second,) = await queue.claim("w2", ROOMY)
    assert second.request == again
    assert not await queue.finish(lease, answer(lease))
    assert await queue.finish(second, answer(second))


async def test_only_a_crash_while_alone_is_reported_as_such(world, queue, events, make):
    await queue.enqueue([make(alone=True), make(suspects="half")])
    for worker in ("w1", "w2"):
        (lease,) = await queue.claim(worker, ROOMY)
        await world.expire(lease)
    await queue.reap()
    assert [event.alone for event in await read_events(events)] == [True, False]


async def test_a_renewed_lease_lives_on(world, queue, lease, answer):
    await world.expire(lease)
    assert await queue.renew("w", [lease]) == Renewal()
    assert await queue.reap() == []
    assert await queue.finish(lease, answer(lease))


async def test_many_leases_expire_together(world, queue, events, make):
    await queue.enqueue([make() for _ in range(450)])
    leases = await queue.claim("w", Capacity(10**9, 0, requests=450))
    await world.expire(*leases)
    assert set(await queue.reap()) == {one.request.request_id for one in leases}
    assert await events.pending() == 450


async def test_a_released_request_is_ready_again_at_its_place(queue, events, make):
    first, second = make(), make()
    await queue.enqueue([first, second])
    (lease,) = await queue.claim("w", Capacity(100_000, 0, requests=1))
    assert await queue.release(lease)
    assert await queue.release(lease)
    assert [one.request for one in await queue.claim("w2", ROOMY)] == [first, second]
    assert await events.pending() == 0
    assert not await queue.release(lease)


async def test_emitted_events_reach_the_collector_in_order(queue, events, lease, answer):
    assert await queue.emit(lease, started(lease))
    assert await queue.finish(lease, answer(lease))
    assert await read_events(events) == [started(lease), answer(lease)]
    assert not await queue.emit(lease, started(lease))


async def test_deltas_stay_off_the_collectors_stream(world, queue, events, make, answer):
    await queue.enqueue([make(stream=True)])
    (lease,) = await queue.claim("w", ROOMY)
    request_id = lease.request.request_id
    deltas = [
        Delta(request_id=request_id, attempt=1, choice=0, index=i, token_ids=(i,), text=str(i))
        for i in range(3)
    ]
    for delta in deltas:
        assert await queue.emit(lease, delta)
    assert not await queue.emit(forged(lease), deltas[0])
    assert await events.pending() == 0
    await queue.finish(lease, answer(lease))

    with world.tokens().follow(request_id) as reader:
        assert [entry.event for entry in await reader.read(0)] == [*deltas, answer(lease)]
        assert await reader.read(0.01) == []


async def test_a_streamed_request_cancelled_while_ready_ends_its_stream(world, queue, make):
    request = make(stream=True)
    await queue.enqueue([request])
    await queue.cancel([request.request_id])
    with world.tokens().follow(request.request_id) as reader:
        (entry,) = await reader.read(0)
    assert entry.event == Cancelled(request_id=request.request_id, attempt=1)
