"""Whose turn it is: classes, deadlines, and virtual token counters between tenants."""

import asyncio
from collections import Counter
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from worker.protocol.types import Capacity
from worker.queue.memory import MemoryQueue, MemoryServer
from worker.queue.settings import QueueSettings

ONE = Capacity(kv_tokens=10**9, adapter_rank=0, requests=1, running=1)


async def serve(queue, answer, count, completion=100):
    """Claim and finish one request at a time; answer who was served, in order."""
    served = []
    for _ in range(count):
        leases = await queue.claim("w", ONE)
        if not leases:
            break
        await queue.finish(leases[0], answer(leases[0], completion))
        served.append(leases[0].request)
    return served


def tenants(requests):
    return [request.tenant for request in requests]


def classes(requests):
    return Counter(request.request_class for request in requests)


async def test_a_newcomer_does_not_wait_for_a_long_backlog(queue, make, answer):
    await queue.enqueue([make("big") for _ in range(50)])
    assert tenants(await serve(queue, answer, 10)) == ["big"] * 10
    await queue.enqueue([make("small") for _ in range(10)])
    assert tenants(await serve(queue, answer, 20)).count("small") == 10


async def test_longer_prompts_get_the_same_tokens(queue, make, answer):
    await queue.enqueue([make("long", prompt=1_000) for _ in range(60)])
    await queue.enqueue([make("short", prompt=100) for _ in range(60)])
    served = Counter(tenants(await serve(queue, answer, 40)))
    long, short = served["long"] * 1_200, served["short"] * 300
    assert abs(long - short) <= 2 * 1_200


async def test_weights_share_the_tokens(queue, make, answer):
    await queue.enqueue([make("light", weight=1.0) for _ in range(80)])
    await queue.enqueue([make("heavy", weight=3.0) for _ in range(80)])
    served = Counter(tenants(await serve(queue, answer, 80)))
    assert served["heavy"] == pytest.approx(60, abs=2)


async def test_counters_settle_to_what_was_really_used(queue, make, answer):
    await queue.enqueue([make("brief", max_tokens=1_000) for _ in range(2)])
    await queue.enqueue([make("other") for _ in range(2)])
    leases = await queue.claim("w", Capacity(10**9, 0, requests=2))
    charged = (await queue.counters())["batch"]
    assert charged == {"brief": 100 + 2 * 256, "other": 100 + 2 * 100}
    for lease in leases:
        await queue.finish(lease, answer(lease, 10))
    assert (await queue.counters())["batch"] == {"brief": 120, "other": 120}


async def test_what_was_not_served_is_not_charged(world, queue, make):
    await queue.enqueue([make(name) for name in ("released", "reaped", "forgotten") * 2])
    leases = await queue.claim("w", Capacity(10**9, 0, requests=3))
    assert set((await queue.counters())["batch"].values()) == {300}
    by_tenant = {lease.request.tenant: lease for lease in leases}
    await world.expire(by_tenant["reaped"])
    await queue.reap()
    await queue.release(by_tenant["released"])
    await queue.forget([by_tenant["forgotten"].request.request_id])
    assert set((await queue.counters())["batch"].values()) == {0}


async def test_cancelled_lines_leave_counters_right(queue, make, answer):
    lines = [make("a") for _ in range(10)]
    await queue.enqueue([*lines, make("b"), make("b")])
    await queue.cancel([line.request_id for line in lines[:9]])
    assert (await queue.counters())["batch"] == {"a": 0, "b": 0}
    assert sorted(tenants(await serve(queue, answer, 2))) == ["a", "b"]


async def test_idling_earns_no_credit(queue, make, answer):
    await queue.enqueue([make("idler"), *(make("worker") for _ in range(40))])
    await serve(queue, answer, 21)
    await queue.enqueue([make("idler") for _ in range(10)])
    counters = (await queue.counters())["batch"]
    assert counters["idler"] == counters["worker"] > 0
    assert tenants(await serve(queue, answer, 10)).count("idler") == 5


async def test_leaving_forgives_nothing(queue, make, answer):
    await queue.enqueue([make("glutton", prompt=5_000), make("modest"), make("modest")])
    await serve(queue, answer, 2)
    await queue.enqueue([make("glutton", prompt=5_000)])
    counters = (await queue.counters())["batch"]
    assert counters["glutton"] == 5_200
    assert counters["modest"] < counters["glutton"]


async def test_a_newcomer_starts_level_with_those_that_only_run(queue, make):
    await queue.enqueue([make("old")])
    await queue.claim("w", ONE)
    await queue.enqueue([make("new")])
    assert (await queue.counters())["batch"] == {"new": 300}


async def test_after_everybody_left_all_start_level(queue, make, answer):
    await queue.enqueue([make("first")])
    await serve(queue, answer, 1)
    await queue.enqueue([make("first"), make("second")])
    assert (await queue.counters())["batch"] == {"first": 300, "second": 300}


async def test_counters_stay_bounded(world, make, answer):
    queue = world.queue(QueueSettings(rebase_at=1_000))
    await queue.enqueue([make(name) for name in ("a", "b") for _ in range(50)])
    served = await serve(queue, answer, 60)
    counters = (await queue.counters())["batch"]
    assert Counter(tenants(served)) == {"a": 30, "b": 30}
    assert max(counters.values()) <= 1_000 + 2 * 300


async def test_within_a_tenant_order_decides_then_arrival(queue, make, answer):
    requests = [make(order=2.0), make(order=1.0), make(order=-1.5), make(order=1.0)]
    await queue.enqueue(requests)
    served = await serve(queue, answer, 4)
    assert served == [requests[2], requests[1], requests[3], requests[0]]


async def test_higher_classes_go_first_but_for_a_floor_share(queue, make, answer):
    for name in ("batch", "standard", "interactive"):
        await queue.enqueue([make(request_class=name) for _ in range(250)])
    served = classes(await serve(queue, answer, 200))
    assert served == {"interactive": 170, "standard": 20, "batch": 10}


async def test_without_floor_shares_classes_are_strict(world, make, answer):
    queue = world.queue(QueueSettings(standard_share=0, batch_share=0))
    await queue.enqueue([make(), make(request_class="standard")])
    await queue.enqueue([make(request_class="interactive") for _ in range(20)])
    names = [request.request_class for request in await serve(queue, answer, 22)]
    assert names == ["interactive"] * 20 + ["standard", "batch"]


async def test_a_closing_deadline_goes_before_its_turn(world, queue, make, answer):
    await queue.enqueue([make("other") for _ in range(20)])
    now = await world.now()
    closing = make("late", deadline=now + 300, order=9.0)
    await queue.enqueue([*(make("late") for _ in range(5)), closing])
    assert closing in await serve(queue, answer, 2)


async def test_deadlines_far_off_or_past_change_nothing(world, queue, make, answer):
    now = await world.now()
    await queue.enqueue([make(order=1.0) for _ in range(5)])
    await queue.enqueue([make(order=2.0, deadline=now + 86_400), make(order=3.0, deadline=now - 1)])
    assert [request.order for request in await serve(queue, answer, 7)] == [1.0] * 5 + [2.0, 3.0]


async def test_deadlines_cannot_starve_the_others(world, queue, make, answer):
    now = await world.now()
    await queue.enqueue([make("hasty", deadline=now + 60 + i) for i in range(100)])
    await queue.enqueue([make("patient") for _ in range(100)])
    await queue.enqueue([make("chat", request_class="interactive") for _ in range(100)])
    served = Counter(tenants(await serve(queue, answer, 100)))
    assert served["hasty"] <= 55
    assert served["chat"] >= 40


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 2**32), slots=st.integers(1, 12))
def test_unfairness_between_backlogged_tenants_is_bounded(make, answer, seed, slots):
    """By the longest input, one request's output, and the output in flight on the whole fleet.

    VTC's own bound is twice the larger of the first and the last; one output comes on top because
    it is charged when a request is claimed. Input counts when claimed, output when finished.
    """
    random = Random(seed)
    names, longest, most = ("a", "b", "c"), 1_000, 200
    bound = longest + 2 * most + 2 * slots * most
    prompts = {name: random.randint(1, longest) for name in names}

    async def run():
        queue = MemoryQueue(MemoryServer(), "m")
        lines = [make(name, prompt=prompts[name], max_tokens=most) for name in names * 60]
        await queue.enqueue(random.sample(lines, len(lines)))
        held, served = [], dict.fromkeys(names, 0)
        while set((await queue.counters())["batch"]) == set(names):
            room = Capacity(10**9, 0, requests=slots - len(held), running=len(held))
            claimed = await queue.claim("w", room)
            for lease in claimed:
                served[lease.request.tenant] += len(lease.request.prompt_ids)
            held += claimed
            lease = held.pop(random.randrange(len(held)))
            completion = random.randint(1, most)
            await queue.finish(lease, answer(lease, completion))
            served[lease.request.tenant] += 2 * completion
            assert max(served.values()) - min(served.values()) <= bound

    asyncio.run(run())
