"""Events reach a collector at least once, whoever dies."""

import asyncio

import pytest

from worker.protocol.codec import encode
from worker.protocol.messages import Cancelled, Started
from worker.protocol.types import Capacity
from worker.queue.settings import QueueSettings

ROOMY = Capacity(kv_tokens=10**9, adapter_rank=1000, requests=100)


def numbered(count):
    return [Started(request_id=f"r{i}", attempt=1, worker="w") for i in range(count)]


@pytest.fixture
async def written(world):
    events = numbered(5)
    for event in events:
        await world.add_raw_event(encode(event))
    return events


def decoded(entries):
    return [entry.event for entry in entries]


def ids(entries):
    return [entry.entry_id for entry in entries]


async def test_entries_come_in_order_and_are_counted_until_acknowledged(events, written):
    first = await events.read("c", 2, 0)
    rest = await events.read("c", 10, 0)
    assert decoded(first) + decoded(rest) == written
    assert await events.pending() == 5
    await events.ack(ids(first))
    await events.ack(ids(first))
    assert await events.pending() == 3
    await events.ack([])
    await events.ack(ids(rest))
    assert await events.pending() == 0
    assert await events.read("c", 10, 0) == []


async def test_what_was_written_before_the_first_collector_is_read(world, written):
    assert decoded(await world.events().read("late", 10, 0)) == written


async def test_a_restarted_collector_gets_its_own_entries_first(world, events, written):
    held = await events.read("c", 3, 0)
    restarted = world.events()
    assert await restarted.read("c", 2, 0) == held[:2]
    assert await restarted.read("c", 2, 0) == held[2:]
    assert decoded(await restarted.read("c", 10, 0)) == written[3:]


async def test_two_collectors_share_the_entries(world, events, written):
    mine = await events.read("c1", 3, 0)
    theirs = await world.events().read("c2", 10, 0)
    assert decoded(mine) + decoded(theirs) == written


async def test_a_dead_collectors_entries_go_to_another(world, events, written):
    held = await events.read("dead", 3, 0)
    await world.silence("dead")
    other = world.events()
    assert await other.read("alive", 10, 0) == held
    assert decoded(await other.read("alive", 10, 0)) == written[3:]
    await other.ack(ids(held))
    assert await other.pending() == 2


async def test_a_reader_waits_for_the_first_entry(world, events):
    waiting = asyncio.create_task(events.read("c", 10, 20))
    assert await events.read("other", 10, 0) == []
    await world.add_raw_event(encode(numbered(1)[0]))
    late = asyncio.create_task(events.read("third", 10, 0))
    assert decoded(await waiting) + decoded(await late) == numbered(1)


async def test_a_waiting_reader_gives_up(events):
    assert await events.read("c", 10, 0.05) == []


async def test_undecodable_events_become_dead_letters(world, queue, events):
    await world.add_raw_event(b"\xffnew")
    await world.add_raw_event(b"\x01old")
    await world.add_raw_event(encode(numbered(1)[0]))
    entries = await events.read("c", 10, 0)
    assert decoded(entries) == [None, None, *numbered(1)]
    await events.ack(ids(entries))
    assert await events.pending() == 0
    newest, oldest = await queue.dead_letters()
    assert (oldest.kind, oldest.request_id, oldest.data) == ("event", "", b"\xffnew")
    assert "version 255" in oldest.reason
    assert newest.data == b"\x01old"
    assert await queue.dead_letters(1) == [newest]


async def test_claims_stop_while_the_collector_is_behind(world, make):
    queue, events = world.queue(QueueSettings(stream_limit=2)), world.events()
    await queue.enqueue([make()])
    for event in numbered(3):
        await world.add_raw_event(encode(event))
    assert await queue.claim("w", ROOMY) == []
    first, *_ = await events.read("c", 10, 0)
    await events.ack([first.entry_id])
    assert len(await queue.claim("w", ROOMY)) == 1


async def test_a_flush_in_mid_read_ends_nothing(world, events, written):
    held = await events.read("c", 2, 0)
    await world.flush()
    await events.ack(ids(held))
    assert await events.pending() == 0
    await world.add_raw_event(encode(written[0]))
    assert decoded(await events.read("c", 10, 0)) == written[:1]


async def test_a_reader_that_waits_survives_a_flush(world, queue, events, make):
    assert await events.read("c", 10, 0) == []
    waiting = asyncio.create_task(events.read("c", 10, 20))
    await events.pending()
    await world.flush()
    request = make()
    await queue.enqueue([request])
    await queue.cancel([request.request_id])
    cancelled = Cancelled(request_id=request.request_id, attempt=1)
    assert decoded(await waiting) == [cancelled]
