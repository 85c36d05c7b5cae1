"""Registered prefixes: shared by all tenants, kept under pressure, in nobody's way."""

from __future__ import annotations

import random

import pytest

from tests.engine.harness import Harness, adapter
from worker.engine.block_manager import BlockManager
from worker.engine.config import SchedulerConfig
from worker.engine.errors import CapacityExceeded
from worker.protocol.types import SharedPrefix

PREFIX = tuple(range(24))  # six blocks
OTHER = tuple(range(30, 46))  # four blocks


def blocks(harness: Harness) -> BlockManager:
    return harness.engine.scheduler.blocks


def ask(harness: Harness, name: str, prompt: tuple[int, ...], shared: int = 24) -> int:
    """Cached tokens of a request of a tenant of its own."""
    harness.add(name, prompt, max_tokens=3, cache_scope=name, shared_tokens=shared)
    while harness.engine.has_work():
        harness.step()
    return harness.finished()[name].usage.cached


def fill_the_pool(harness: Harness, seed: int = 0) -> None:
    """Requests of other tenants that together need every block several times."""
    numbers = random.Random(seed)
    for number in range(12):
        prompt = [numbers.randrange(60) for _ in range(40)]
        harness.add(f"pressure-{seed}-{number}", prompt, max_tokens=20, cache_scope="p")
    while harness.engine.has_work():
        harness.step()


def test_pinned_blocks_survive_pressure_and_are_given_up_when_unpinned() -> None:
    harness = Harness(num_blocks=40, pinned_share=0.2)
    assert harness.engine.share([SharedPrefix(PREFIX)]) == 6
    assert ask(harness, "first", (*PREFIX, 50)) == 0
    assert blocks(harness).cache.num_kept == 6
    fill_the_pool(harness)
    assert ask(harness, "second", (*PREFIX, 51)) == 24
    assert harness.engine.share([]) == 0
    assert blocks(harness).cache.num_kept == 0
    fill_the_pool(harness, seed=1)
    assert ask(harness, "third", (*PREFIX, 52)) == 0
    harness.check_idle()


def test_blocks_behind_a_window_are_kept_too() -> None:
    harness = Harness(num_blocks=80, windows=(None, 6), pinned_share=0.2)
    assert harness.engine.share([SharedPrefix(PREFIX)]) == 6
    ask(harness, "first", (*PREFIX, 50))
    assert blocks(harness).cache.num_kept == 12
    fill_the_pool(harness)
    assert ask(harness, "second", (*PREFIX[:8], 51, 52), shared=8) == 8
    assert ask(harness, "third", (*PREFIX, 51)) == 24


def test_without_pins_the_same_pressure_evicts() -> None:
    harness = Harness(num_blocks=40)
    ask(harness, "first", (*PREFIX, 50))
    fill_the_pool(harness)
    assert ask(harness, "second", (*PREFIX, 51)) == 0


def test_what_is_cached_already_is_pinned_where_it_is() -> None:
    harness = Harness(num_blocks=40, pinned_share=0.2)
    ask(harness, "first", (*PREFIX, 50))
    harness.engine.share([SharedPrefix(PREFIX)])
    assert blocks(harness).cache.num_kept == 6
    fill_the_pool(harness)
    assert ask(harness, "second", (*PREFIX, 51)) == 24


def test_pins_are_bounded_and_the_first_prefix_comes_first() -> None:
    harness = Harness(num_blocks=40, pinned_share=0.2)  # eight blocks
    longer = (*PREFIX[:12], *OTHER)
    prefixes = [SharedPrefix(PREFIX), SharedPrefix(PREFIX[:10]), SharedPrefix(longer)]
    assert harness.engine.share(prefixes) == 8
    ask(harness, "a", (*PREFIX, 50))
    ask(harness, "b", (*longer, 50), shared=28)
    assert blocks(harness).cache.num_kept == 8
    fill_the_pool(harness)
    assert ask(harness, "c", (*PREFIX, 51)) == 24
    assert ask(harness, "d", (*longer, 51), shared=28) == 20


def test_a_prefix_is_pinned_for_its_adapter_alone() -> None:
    harness = Harness(num_blocks=60, pinned_share=0.2)
    harness.engine.share([SharedPrefix(PREFIX, "a")])
    for name, ref in (("base", None), ("a", adapter("a"))):
        prompt = (*PREFIX, 50)
        harness.add(name, prompt, max_tokens=2, adapter=ref, cache_scope=name, shared_tokens=24)
    while harness.engine.has_work():
        harness.step()
    assert blocks(harness).cache.num_kept == 6


@pytest.mark.parametrize("shared", [0, 24])
def test_tokens_are_the_same_hit_or_miss(shared: int) -> None:
    harness = Harness(num_blocks=60, pinned_share=0.2)
    harness.engine.share([SharedPrefix(PREFIX)])
    for name in ("one", "two"):
        ask(harness, name, (*PREFIX, 7), shared=shared)
    expected = [harness.runner.expected((*PREFIX, 7), "", 0, 3)]
    assert harness.answers("one") == harness.answers("two") == expected
    assert harness.finished()["two"].usage.cached == shared


def test_the_largest_request_runs_beside_all_pins() -> None:
    """Never a deadlock: nothing is accepted that needs pinned blocks."""
    harness = Harness(num_blocks=20, pinned_share=0.5, token_budget=16)
    harness.engine.share([SharedPrefix(PREFIX), SharedPrefix(OTHER)])
    ask(harness, "a", (*PREFIX, 50))
    ask(harness, "b", (*OTHER, 50), shared=16)
    assert blocks(harness).cache.num_kept == 10
    limit = harness.engine.limits().kv_tokens
    assert limit == 40
    assert harness.engine.capacity().kv_tokens == limit
    with pytest.raises(CapacityExceeded):
        harness.add("too large", range(30), max_tokens=12)
    for number in range(3):
        harness.add(f"large-{number}", range(number, 30 + number), max_tokens=11)
    while harness.engine.has_work():
        harness.step()
    assert len(harness.finished()) == 5
    assert blocks(harness).cache.num_kept == 10


@pytest.mark.parametrize("windows", [(None,), (9,), (None, 9)])
@pytest.mark.parametrize("seed", range(6))
def test_pins_that_come_and_go_under_load_never_stop_it(
    seed: int, windows: tuple[int | None, ...]
) -> None:
    numbers = random.Random(seed)
    sizes = {"num_blocks": 24 * len(windows), "token_budget": 24, "max_sequences": 6}
    harness = Harness(pinned_share=0.3, windows=windows, **sizes)
    registered = [PREFIX, OTHER, (*PREFIX[:8], *OTHER)]
    added, steps = 0, 0
    while added < 60 or harness.engine.has_work():
        steps += 1
        assert steps < 5000, "no progress"
        if added < 60 and numbers.random() < 0.4:
            start = numbers.choice(registered)
            tail = [numbers.randrange(60) for _ in range(numbers.randrange(1, 12))]
            name, shared = f"r{added}", numbers.choice((0, len(start)))
            scope = f"t{added % 3}"
            harness.add(
                name,
                [*start, *tail],
                max_tokens=numbers.randrange(1, 16),
                cache_scope=scope,
                shared_tokens=shared,
            )
            added += 1
        if numbers.random() < 0.1:
            chosen = numbers.sample(registered, numbers.randrange(4))
            harness.engine.share([SharedPrefix(tokens) for tokens in chosen])
        if harness.engine.has_work():
            harness.step()  # checks that every block is in one place
    assert len(harness.finished()) == 60
    harness.engine.share([])
    harness.check_idle()


def test_the_share_is_checked() -> None:
    with pytest.raises(ValueError, match="pinned_share"):
        SchedulerConfig(num_blocks=10, pinned_share=0.6)


def test_a_block_that_collides_with_a_pinned_one_goes_before_those_above_it() -> None:
    """Keys that know only a block's own tokens: the end of `PREFIX` is found below `OTHER`."""
    harness = Harness(num_blocks=40, pinned_share=0.2)
    cache = blocks(harness).cache
    cache._hash = lambda content: hash(content[2]) if isinstance(content, tuple) else 0
    harness.engine.share([SharedPrefix(PREFIX)])
    prompt = (*OTHER, *PREFIX[-8:], 50)
    ask(harness, "other", prompt)
    assert cache.num_kept == 0
    fill_the_pool(harness)
    ask(harness, "again", prompt)
    assert harness.answers("again") == [harness.runner.expected(prompt, "", 0, 3)]


def test_kept_blocks_are_counted_as_cached_and_as_nobodys() -> None:
    """Nor do they count as slots that running sequences hold."""
    slots = []
    for prefixes in ([], [SharedPrefix(PREFIX)]):
        harness = Harness(num_blocks=40, pinned_share=0.2)
        harness.engine.share(prefixes)
        ask(harness, "first", (*PREFIX, 50))
        stats = harness.engine.stats()
        assert (stats.blocks_used, stats.memory_use, stats.waste) == (0, 0, 0)
        assert stats.blocks_cached == len(blocks(harness).cache) == 6
        ask(harness, "second", OTHER, shared=0)
        slots.append(harness.engine.counters.allocated_slots)
    assert slots[0] == slots[1]
