"""A prefix is computed once, by whoever comes first, and shared only where that is right."""

from __future__ import annotations

import pytest

from tests.engine.harness import Harness, adapter
from tests.engine.shadow import ShadowResidency
from worker.protocol.types import RequestId, SamplingParams

PREFIX = tuple(range(24))


def prefill(harness: Harness) -> int:
    return harness.engine.stats().counters.prefill_tokens


@pytest.mark.parametrize("budget", [5, 16, 1000])
def test_requests_that_arrive_together_compute_their_prefix_once(budget: int) -> None:
    harness = Harness(token_budget=budget, num_blocks=200)
    for number in range(10):
        harness.add(str(number), [*PREFIX, 40 + number], max_tokens=3)
    finished = harness.run()
    assert prefill(harness) == 24 + 10
    assert sorted(f.usage.cached for f in finished.values()) == [0, *[24] * 9]


def test_blocks_are_shared_only_after_the_step_that_computed_them() -> None:
    harness = Harness()
    for name in ("one", "two"):
        harness.add(name, PREFIX, max_tokens=2)
    harness.step()
    assert harness.running() == ["one"]
    harness.step()
    assert harness.running() == ["two"], "one is done, two has come in"
    assert harness.run()["two"].usage.cached == 20


def test_equal_answers_come_to_share_their_blocks() -> None:
    harness = Harness()
    harness.add("one", PREFIX[:3], max_tokens=30)
    harness.add("two", PREFIX[:3], max_tokens=30)
    for _ in range(25):
        harness.step()
    one, two = harness.engine.scheduler.running
    assert one.block_table[:6] == two.block_table[:6]
    harness.run()
    assert harness.answers("one") == harness.answers("two")


@pytest.mark.parametrize("end", ["cancel", "poison"])
def test_who_waits_for_a_prefix_goes_on_when_its_owner_ends(end: str) -> None:
    harness = Harness(token_budget=8)
    harness.add("owner", PREFIX, max_tokens=2)
    harness.add("waits", PREFIX, max_tokens=2)
    harness.step()
    if end == "cancel":
        harness.engine.cancel([RequestId("owner")])
    else:
        harness.runner.poisoned.add("owner")
    finished = harness.run()
    assert list(finished) == ["waits"]
    assert finished["waits"].usage.cached == (8 if end == "cancel" else 0)


def test_others_overtake_one_that_waits_for_a_prefix() -> None:
    harness = Harness(token_budget=20)
    harness.add("owner", PREFIX, max_tokens=2)
    harness.add("waits", PREFIX, max_tokens=2)
    harness.add("other", [9, 9, 9], max_tokens=2)
    harness.step()
    harness.step()
    assert set(harness.running()) >= {"owner", "other"}
    harness.run()


def test_the_same_prompt_under_base_and_two_adapters_shares_nothing() -> None:
    harness = Harness()
    for name, ref in (("base", None), ("a", adapter("a")), ("b", adapter("b"))):
        harness.add(name, PREFIX, max_tokens=3, adapter=ref)
    finished = harness.run()
    assert {f.usage.cached for f in finished.values()} == {0}
    assert prefill(harness) == 3 * 24


def test_tenants_share_only_the_registered_prefix() -> None:
    harness = Harness()
    harness.add("one", PREFIX, max_tokens=2, cache_scope="one", shared_tokens=10)
    harness.add("two", PREFIX, max_tokens=2, cache_scope="two", shared_tokens=10)
    harness.add("three", PREFIX, max_tokens=2, cache_scope="three")
    finished = harness.run()
    assert [finished[name].usage.cached for name in ("one", "two", "three")] == [0, 8, 0]


def test_an_activated_adapter_starts_from_the_base_models_cache() -> None:
    residency = ShadowResidency(64)
    residency.starts["late"] = 17
    harness = Harness(residency=residency, adapter_rank=64)
    harness.add("base", PREFIX, max_tokens=2)
    harness.run()
    harness.add("late", PREFIX, max_tokens=2, adapter=adapter("late"))
    harness.add("again", PREFIX, max_tokens=2, adapter=adapter("late"))
    finished = harness.run()
    assert finished["late"].usage.cached == 16
    assert finished["again"].usage.cached == 20
    assert harness.answers("late") == [harness.runner.expected(PREFIX, "late", 0, 2, 17)]


def test_a_conversation_finds_its_last_turn() -> None:
    harness = Harness()
    harness.add("turn 1", PREFIX, max_tokens=9)
    harness.run()
    history = (*PREFIX, *harness.answers("turn 1")[0], 1, 2, 3)
    harness.add("turn 2", history, max_tokens=2)
    assert harness.run()["turn 2"].usage.cached == 32


def test_cached_tokens_of_a_request_are_those_of_its_first_choice() -> None:
    harness = Harness()
    harness.add("warm", PREFIX, max_tokens=1)
    harness.run()
    harness.add("three", PREFIX, sampling=SamplingParams(max_tokens=2, n=3))
    usage = harness.run()["three"].usage
    assert (usage.prompt, usage.cached, usage.completion) == (24, 20, 6)
