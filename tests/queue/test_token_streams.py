"""Many clients follow many requests; the server sees one connection of them all."""

import asyncio
from contextlib import ExitStack

import pytest

from worker.protocol.messages import Delta
from worker.protocol.types import Capacity
from worker.queue.base import QueueUnavailable
from worker.queue.connection import connect
from worker.queue.redis import Channels, RedisQueue, RedisTokenStream

ROOMY = Capacity(kv_tokens=10**9, adapter_rank=10**6, requests=10_000)
BOUND = 20


def delta(lease, index):
    return Delta(lease.request.request_id, 1, 0, index, (index,), str(index))


async def lease_of(queue, make, **changes):
    await queue.enqueue([make(stream=True, **changes)])
    (lease,) = await queue.claim("w", ROOMY)
    return lease


async def all_of(reader, count):
    """Exactly `count` entries, in however many reads."""
    entries = []
    async with asyncio.timeout(BOUND):
        while len(entries) < count:
            entries += await reader.read(BOUND)
    assert await reader.read(0) == []
    return [entry.event for entry in entries]


async def test_a_reader_waits_for_the_next_entry(world, queue, make, answer):
    lease = await lease_of(queue, make)
    with world.tokens().follow(lease.request.request_id) as reader:
        for event in (delta(lease, 0), answer(lease)):
            waiting = asyncio.create_task(reader.read(BOUND))
            assert await world.queue().known([lease.request.request_id]) == [True]
            await (queue.emit if isinstance(event, Delta) else queue.finish)(lease, event)
            assert [entry.event for entry in await waiting] == [event]


async def test_each_follower_reads_everything_from_the_start(world, queue, make, answer):
    lease = await lease_of(queue, make)
    tokens, name = world.tokens(), lease.request.request_id
    await queue.emit(lease, delta(lease, 0))
    with tokens.follow(name) as first, tokens.follow(name) as second:
        assert await all_of(first, 1) == [delta(lease, 0)]
        await queue.finish(lease, answer(lease))
        rest, whole = await asyncio.gather(all_of(first, 1), all_of(second, 2))
        assert [*rest] == whole[1:] == [answer(lease)]


async def test_a_long_stream_is_read_in_order(world, queue, make):
    lease = await lease_of(queue, make, max_tokens=500)
    for index in range(300):
        await queue.emit(lease, delta(lease, index))
    with world.tokens().follow(lease.request.request_id) as reader:
        assert [event.index for event in await all_of(reader, 300)] == list(range(300))


@pytest.fixture
async def channels(client):
    channels = Channels(client)
    yield channels
    await channels.close()


async def test_a_thousand_followers_take_one_connection(client, channels, make):
    queue, tokens = RedisQueue(client, "m"), RedisTokenStream(client, "m", channels)
    await queue.enqueue([make(stream=True) for _ in range(1000)])
    leases = await queue.claim("w", ROOMY)
    with ExitStack() as stack:
        readers = [stack.enter_context(tokens.follow(lease.request.request_id)) for lease in leases]
        reading = asyncio.gather(*(all_of(reader, 1) for reader in readers))
        for lease in leases:
            await queue.emit(lease, delta(lease, 0))
        async with asyncio.timeout(BOUND):
            assert await reading == [[delta(lease, 0)] for lease in leases]
        assert len(await client.client_list(_type="pubsub")) == 1
        assert len(await client.client_list()) < 10
        counts = dict(await client.pubsub_numsub(*(names(leases[:3]))))
        assert set(counts.values()) == {1}
    async with asyncio.timeout(BOUND):
        while await client.pubsub_channels():  # noqa: ASYNC110  told to the server by a task
            await asyncio.sleep(0.01)
    await queue.close()


def names(leases):
    return [f"batten:{{m}}:tokens:{lease.request.request_id}" for lease in leases]


async def test_a_follower_goes_on_after_a_restart(mortal_redis, make):
    client = connect(mortal_redis.url)
    channels, queue = Channels(client), RedisQueue(client, "m")
    tokens = RedisTokenStream(client, "m", channels)
    lease = await lease_of(queue, make)
    with tokens.follow(lease.request.request_id) as reader:
        mortal_redis.kill()
        with pytest.raises(QueueUnavailable):
            await reader.read(BOUND)
        mortal_redis.start()
        again = await lease_of(queue, lambda stream: lease.request)
        reading = asyncio.create_task(reader_of(reader, 1))
        await queue.emit(again, delta(again, 0))
        assert await reading == [delta(again, 0)]
    await channels.close()
    await client.aclose()


async def reader_of(reader, count):
    """As a client does it: an outage is waited out."""
    entries = []
    async with asyncio.timeout(BOUND):
        while len(entries) < count:
            try:
                entries += await reader.read(BOUND)
            except QueueUnavailable:
                await asyncio.sleep(0.05)
    return [entry.event for entry in entries]
