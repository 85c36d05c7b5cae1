"""What a worker is given: only what fits what it says, and nothing waits for ever."""

import pytest

from worker.protocol.types import AdapterRef, Capacity
from worker.queue.base import CapacityInvalid
from worker.queue.settings import QueueSettings

RED, BLUE = AdapterRef("red", 16), AdapterRef("blue", 8)


def room(kv_tokens=100_000, adapter_rank=1_000, requests=100, **more):
    return Capacity(kv_tokens, adapter_rank, requests, **more)


async def claim(queue, capacity, worker="w"):
    return [lease.request for lease in await queue.claim(worker, capacity)]


@pytest.mark.parametrize("name", ["kv_tokens", "adapter_rank", "requests", "running"])
async def test_impossible_numbers_are_refused(queue, name):
    for nonsense in (-1, 10**30):
        with pytest.raises(CapacityInvalid, match=name):
            await queue.claim("w", room(**{name: nonsense}))


async def test_no_more_requests_than_asked(queue, make):
    requests = [make() for _ in range(3)]
    await queue.enqueue(requests)
    assert await claim(queue, room(requests=0)) == []
    assert await claim(queue, room(requests=2)) == requests[:2]


async def test_requests_fit_together_in_the_kv_tokens(queue, make):
    requests = [make(prompt=100, max_tokens=100) for _ in range(4)]
    await queue.enqueue(requests)
    assert await claim(queue, room(kv_tokens=599, running=1)) == requests[:2]
    assert await claim(queue, room(kv_tokens=199, running=1)) == []


async def test_each_choice_counts(queue, make):
    await queue.enqueue([make(prompt=100, max_tokens=100, n=3)])
    assert await claim(queue, room(kv_tokens=399, running=1)) == []
    assert len(await claim(queue, room(kv_tokens=400, running=1))) == 1


async def test_output_is_predicted_by_default_then_by_experience(queue, make, answer):
    def another(**more):
        return make(max_tokens=1_000, **more)

    await queue.enqueue([another()])
    (first,) = await queue.claim("w", room())
    assert first.predicted_tokens == 256
    await queue.finish(first, answer(first, completion=20))
    await queue.enqueue([another()])
    (second,) = await queue.claim("w", room())
    assert second.predicted_tokens == 20
    await queue.finish(second, answer(second, completion=70))
    await queue.enqueue([another(), another(adapter=RED), another(tenant="other")])
    leases = await queue.claim("w", room())
    assert sorted(lease.predicted_tokens for lease in leases) == [30, 256, 256]


async def test_prediction_keeps_to_what_the_request_allows(queue, make):
    await queue.enqueue([make(max_tokens=7), make(max_tokens=900, ignore_eos=True)])
    assert [one.predicted_tokens for one in await queue.claim("w", room())] == [7, 900]


async def test_an_adapter_takes_its_rank_once(queue, make):
    red, base, blue = [make(adapter=RED) for _ in range(3)], make(), make(adapter=BLUE)
    await queue.enqueue([*red, base, blue])
    taken = await claim(queue, room(adapter_rank=16, running=1))
    assert taken == [base, *red]
    assert await claim(queue, room(adapter_rank=8, running=4)) == [blue]


async def test_a_resident_adapter_takes_no_rank_and_goes_first(queue, make):
    cold, warm = make(adapter=BLUE), make(adapter=RED)
    await queue.enqueue([cold, warm])
    assert await claim(queue, room(adapter_rank=8, requests=1, resident=("red",))) == [warm]
    assert await claim(queue, room(adapter_rank=8, requests=1, resident=("red",))) == [cold]


async def test_neighbours_of_one_prefix_go_together(queue, make):
    def ask(start):
        return make(prompt_ids=tuple(range(start, start + 100)))

    first, other, second = ask(0), ask(500), ask(0)
    await queue.enqueue([first, other, second])
    assert await claim(queue, room(requests=2)) == [first, second]


async def test_preference_looks_only_so_far_ahead(world, make):
    queue = world.queue(QueueSettings(look_ahead=2))
    requests = [make(adapter=BLUE), make(adapter=BLUE), make(adapter=RED)]
    await queue.enqueue(requests)
    assert await claim(queue, room(requests=1, resident=("red",))) == [requests[0]]


async def test_preference_passes_the_first_in_line_over_only_so_often(world, make):
    queue = world.queue(QueueSettings(pass_over_limit=3))
    cold = make(adapter=BLUE)
    await queue.enqueue([cold, *(make(adapter=RED) for _ in range(6))])
    taken = [
        (await claim(queue, room(requests=1, running=1, resident=("red",))))[0] for _ in range(4)
    ]
    assert taken.index(cold) == 3


async def test_small_requests_pass_a_big_one_only_so_often(world, make):
    queue = world.queue(QueueSettings(pass_over_limit=2))
    await queue.claim("w", room(kv_tokens=1_000))
    big = make(prompt=800)
    await queue.enqueue([big, *(make() for _ in range(6))])
    busy = room(kv_tokens=300, requests=1, running=1)
    assert len(await claim(queue, busy)) == 1
    assert len(await claim(queue, busy)) == 1
    assert await claim(queue, busy) == []
    assert await claim(queue, busy) == []
    assert (await claim(queue, room(kv_tokens=1_000, requests=1)))[0] == big
    assert len(await claim(queue, busy)) == 1


async def test_only_one_worker_drains_for_a_big_request(world, make):
    queue = world.queue(QueueSettings(pass_over_limit=1))
    for worker in ("w1", "w2"):
        await queue.claim(worker, room(kv_tokens=1_000))
    big = make(prompt=800)
    await queue.enqueue([big, *(make() for _ in range(6))])
    busy = room(kv_tokens=300, requests=1, running=1)
    assert len(await claim(queue, busy, "w1")) == 1
    assert await claim(queue, busy, "w1") == []
    assert len(await claim(queue, busy, "w2")) == 1
    assert await claim(queue, busy, "w1") == []
    assert await claim(queue, room(kv_tokens=950, requests=1, running=1), "w2") == [big]
    assert len(await claim(queue, busy, "w1")) == 1


async def test_another_worker_drains_when_the_first_is_gone(world, make):
    queue = world.queue(QueueSettings(pass_over_limit=1))
    for worker in ("gone", "w"):
        await queue.claim(worker, room(kv_tokens=1_000))
    big = make(prompt=800)
    await queue.enqueue([big, *(make() for _ in range(6))])
    busy = room(kv_tokens=300, requests=1, running=1)
    assert len(await claim(queue, busy, "gone")) == 1
    assert await claim(queue, busy, "gone") == []
    assert len(await claim(queue, busy)) == 1
    await world.lapse(big.request_id)
    assert await claim(queue, busy) == []
    assert await claim(queue, room(kv_tokens=1_000, requests=1)) == [big]


async def test_what_waits_for_room_holds_up_its_class_and_lower_ones(world, make):
    queue = world.queue(QueueSettings(pass_over_limit=1))
    await queue.claim("w", room(kv_tokens=1_000))
    big, chat = make(prompt=800, request_class="standard"), make(request_class="interactive")
    await queue.enqueue([big, make(request_class="standard"), make(request_class="standard")])
    busy = room(kv_tokens=300, requests=1, running=1)
    assert len(await claim(queue, busy)) == 1
    assert await claim(queue, busy) == []
    await queue.enqueue([make(), chat])
    assert await claim(queue, busy) == [chat]
    assert await claim(queue, busy) == []


async def test_what_can_never_fit_a_worker_holds_up_nobody(world, make):
    queue = world.queue(QueueSettings(pass_over_limit=1))
    await queue.claim("w", room(kv_tokens=1_000, adapter_rank=8))
    huge, wide = make(prompt=5_000), make(adapter=RED)
    small = [make() for _ in range(5)]
    await queue.enqueue([huge, wide, *small])
    busy = room(kv_tokens=300, adapter_rank=8, requests=1, running=1)
    assert [(await claim(queue, busy))[0] for _ in range(5)] == small
    assert await claim(queue, room(kv_tokens=1_000, adapter_rank=8)) == []
    assert await claim(queue, room(), "bigger") == [huge, wide]


async def test_a_worker_drained_for_nothing_goes_on(world, make):
    queue = world.queue(QueueSettings(pass_over_limit=1))
    await queue.enqueue([make(prompt=5_000), *(make() for _ in range(4))])
    busy = room(kv_tokens=300, requests=1, running=1)
    assert len(await claim(queue, busy)) == 1
    assert await claim(queue, busy) == []
    assert len(await claim(queue, room(kv_tokens=1_000, requests=1))) == 1
    assert len(await claim(queue, busy)) == 1


async def test_a_worker_that_has_shrunk_is_not_kept_empty(world, make):
    queue = world.queue(QueueSettings(pass_over_limit=1))
    await queue.claim("w", room(kv_tokens=1_000))
    await queue.enqueue([make(prompt=900), *(make() for _ in range(4))])
    busy = room(kv_tokens=300, requests=1, running=1)
    assert len(await claim(queue, busy)) == 1
    assert await claim(queue, busy) == []
    assert len(await claim(queue, room(kv_tokens=800, requests=1))) == 1
    assert len(await claim(queue, busy)) == 1


async def test_an_idle_worker_begins_what_was_predicted_to_need_more(queue, make):
    request = make(prompt=100, max_tokens=1_000)
    await queue.enqueue([request])
    assert await claim(queue, room(kv_tokens=300, running=1)) == []
    assert await claim(queue, room(kv_tokens=100)) == []
    assert await claim(queue, room(kv_tokens=300)) == [request]


async def test_alone_means_an_idle_worker_and_no_one_else(queue, make, answer):
    suspect, other = make(alone=True), make()
    await queue.enqueue([suspect])
    assert await claim(queue, room(running=1)) == []
    await queue.enqueue([other])
    (lease,) = await queue.claim("w", room())
    assert lease.request == suspect
    assert await claim(queue, room(running=1)) == []
    assert await claim(queue, room(running=1), "w2") == [other]
    await queue.finish(lease, answer(lease))
    await queue.enqueue([make()])
    assert len(await claim(queue, room())) == 1
    await queue.enqueue([make()])
    assert len(await claim(queue, room(running=1))) == 1


async def test_a_suspect_behind_others_runs_when_the_worker_is_empty(world, make):
    queue = world.queue(QueueSettings(pass_over_limit=1))
    await queue.claim("w", room())
    suspect = make(alone=True)
    await queue.enqueue([make(order=-1.0), suspect, make(), make()])
    assert len(await claim(queue, room(requests=1))) == 1
    assert len(await claim(queue, room(requests=1, running=1))) == 1
    assert await claim(queue, room(running=2)) == []
    assert await claim(queue, room()) == [suspect]


async def test_suspects_run_with_their_group_and_nobody_else(queue, make, answer):
    group = [make(suspects="half", order=float(i)) for i in range(3)]
    await queue.enqueue([make("abacus"), *group])
    assert [one.tenant for one in await claim(queue, room(requests=1), "w1")] == ["abacus"]
    leases = await queue.claim("w2", room(requests=2))
    assert [lease.request for lease in leases] == group[:2]
    late = make("initech", suspects="half")
    await queue.enqueue([make("abacus"), late])
    assert await claim(queue, room(running=2), "w2") == [late, group[2]]
    assert len(await claim(queue, room(running=1), "w1")) == 1
    await queue.enqueue([make()])
    assert await claim(queue, room(running=1), "w2") == []
    assert len(await claim(queue, room(), "w2")) == 1


async def test_groups_of_suspects_never_mix(queue, make):
    await queue.enqueue([make(suspects=name) for name in ("one", "other", "one", "other")])
    first, second = await claim(queue, room(), "w1"), await claim(queue, room(), "w2")
    assert {one.suspects for one in first} == {"one"}
    assert {one.suspects for one in second} == {"other"}
    assert len(first) == len(second) == 2


async def test_cancelled_suspects_are_answered_and_not_run(world, queue, make):
    group = [make(suspects="half") for _ in range(3)]
    await queue.enqueue(group)
    await world.plant_tombstone(group[1].request_id)
    assert await claim(queue, room()) == [group[0], group[2]]
