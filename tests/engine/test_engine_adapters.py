"""Adapters of many ranks share the pool: mixed batches, loads, failures, and nobody starves."""

from __future__ import annotations

import pytest

from tests.engine.harness import Harness, adapter
from tests.engine.shadow import ShadowResidency
from worker.engine.adapter_gate import POLLED, AdapterGate
from worker.engine.batch import AdapterLoadError
from worker.engine.outputs import FailedOutput
from worker.protocol.types import AdapterRef, RequestId


def harness_with(
    rank: int, delay: int = 0, broken: dict[str, str] | None = None, **config: object
) -> Harness:
    residency = ShadowResidency(rank, delay, broken)
    return Harness(residency=residency, adapter_rank=rank, **config)


def test_one_step_mixes_base_and_adapters_of_different_ranks() -> None:
    harness = harness_with(64)
    for name, ref in (("base", None), ("a", adapter("a", 8)), ("b", adapter("b", 16))):
        harness.add(name, [1, 2, 3], max_tokens=3, adapter=ref)
    harness.step()
    assert {s.sequence.request_id for s in harness.runner.batches[0].sequences} == {
        "base",
        "a",
        "b",
    }
    harness.run()
    assert harness.answers("a") == [harness.runner.expected((1, 2, 3), "a", 0, 3)]


def test_a_loading_adapter_delays_only_its_own() -> None:
    harness = harness_with(64, delay=5)
    harness.add("slow", [1], max_tokens=2, adapter=adapter("a"))
    harness.add("base", [2], max_tokens=2)
    harness.step()
    harness.step()
    assert list(harness.finished()) == ["base"]
    assert not harness.engine.stalled
    harness.step()
    assert harness.engine.stalled
    harness.run()
    assert list(harness.finished()) == ["base", "slow"]


@pytest.mark.parametrize(
    ("code", "retryable"),
    [("adapter_unavailable", True), ("store_unavailable", True), ("adapter_invalid", False)],
)
def test_a_broken_adapter_fails_its_requests_and_no_others(code: str, retryable: bool) -> None:
    harness = harness_with(16, delay=2, broken={"bad": code})
    harness.add("x", [1], adapter=adapter("bad"))
    harness.add("y", [1], adapter=adapter("good"))
    harness.add("z", [1], adapter=adapter("bad"))
    finished = harness.run()
    assert list(finished) == ["y"]
    assert [(f.request_id, f.code, f.retryable) for f in harness.of(FailedOutput)] == [
        ("x", code, retryable),
        ("z", code, retryable),
    ]


def test_adapters_that_the_store_does_not_give_hold_up_no_others() -> None:
    """More of them than are looked at in a step, each as large as the pool."""
    harness = harness_with(16, delay=1, max_sequences=4, drain_after=5)
    harness.residency.away = {f"away{number}" for number in range(POLLED + 10)}
    for name in sorted(harness.residency.away):
        harness.add(name, [1], max_tokens=2, adapter=adapter(name, 16))
    for number in range(20):
        harness.add(f"x{number}", [1], max_tokens=2, adapter=adapter(f"good{number % 5}"))
    for _ in range(200):
        harness.step()
    assert len(harness.finished()) == 20
    harness.residency.away.clear()
    assert len(harness.run(most=4000)) == POLLED + 30


def test_a_load_that_fails_later_fails_all_who_wait_for_it() -> None:
    harness = harness_with(16, delay=3)
    for name in ("x", "y"):
        harness.add(name, [1], adapter=adapter("bad"))
    harness.add("z", [1], max_tokens=20)
    harness.step()
    harness.residency.broken["bad"] = "adapter_unavailable"
    harness.run()
    assert {f.request_id for f in harness.of(FailedOutput)} == {"x", "y"}
    assert list(harness.finished()) == ["z"]


def test_one_adapter_more_than_the_pool_holds() -> None:
    """Also while the others are in the middle of a prompt."""
    harness = harness_with(24, token_budget=4, max_sequences=8)
    for name in "abcd":
        harness.add(name, range(13), max_tokens=3, adapter=adapter(name))
    assert set(harness.run()) == set("abcd")


def test_two_hundred_requests_over_fifty_adapters_end() -> None:
    harness = harness_with(24, delay=2, max_sequences=16, token_budget=64)
    for number in range(200):
        harness.add(
            str(number), [number % 7, 2, 3], max_tokens=3, adapter=adapter(str(number % 50))
        )
    assert len(harness.run(most=4000)) == 200


@pytest.mark.parametrize("wanted", [8, 16, 24])
def test_continuous_traffic_does_not_starve_another_adapter(wanted: int) -> None:
    """Three adapters fill the pool and never pause; a fourth is drained for."""
    harness = harness_with(24, delay=1, max_sequences=12, drain_after=10, num_blocks=200)
    sent = 0
    harness.add("late", [1, 2], max_tokens=2, adapter=adapter("late", wanted))
    for _ in range(3):
        for name in "abc":
            harness.add(f"{name}{sent}", [3], max_tokens=9, adapter=adapter(name))
            sent += 1
    for step in range(80):
        harness.step()
        if "late" in harness.finished():
            break
        if step % 2:
            for name in "abc":
                harness.add(f"{name}{sent}", [3], max_tokens=9, adapter=adapter(name))
                sent += 1
    assert "late" in harness.finished(), f"starved for {step} steps"
    harness.run()


def test_a_drain_spares_those_it_does_not_need() -> None:
    gate = AdapterGate(residency := ShadowResidency(24), 24, drain_after=3)
    for name, users in (("a", 3), ("b", 1), ("c", 2)):
        assert gate.admits(adapter(name), 0)
        for _ in range(users):
            gate.pin(adapter(name))
    late = adapter("late", 8)
    assert not gate.admits(late, 0)
    for step in range(1, 4):
        gate.poll(step)
    assert gate.target == late
    assert [gate.admits(adapter(name), 4) for name in "abc"] == [True, False, True]
    gate.unpin(adapter("b"))
    assert gate.poll(5)[0] == [late]
    assert gate.target is None
    assert gate.poll(6)[0] == [], "b has no rows now"
    assert residency.resident() == ("a", "c", "late")


class Asked(ShadowResidency):
    """Remembers whom it was asked for."""

    def prepare(self, adapter: AdapterRef) -> bool:
        self.names = [*getattr(self, "names", []), adapter.digest]
        return super().prepare(adapter)


def test_adapters_are_asked_for_in_turn_and_only_as_many_as_fit_together() -> None:
    gate = AdapterGate(residency := Asked(20, delay=2), 20, drain_after=9)
    for name in "abcd":
        assert not gate.admits(adapter(name), 0)
    assert residency.names == ["a"], "the others stand behind it"
    gate.poll(1)
    assert residency.names == ["a", "a", "b"], "c and d would take their rows"
    for _ in range(2):
        residency.tick()
    assert gate.poll(2)[0] == [adapter("a"), adapter("b")]
    assert not gate.admits(adapter("small", 4), 2), "it may fit, but others wait"


def test_a_long_load_is_no_reason_to_drain() -> None:
    harness = harness_with(16, delay=50, drain_after=3, max_sequences=8)
    harness.residency.loaded["a"] = 8
    for number in range(3):
        harness.add(f"a{number}", [1], max_tokens=20, adapter=adapter("a"))
    harness.add("late", [1], max_tokens=2, adapter=adapter("late"))
    for _ in range(10):
        harness.step()
    assert harness.engine.scheduler.admission.gate.target is None
    harness.run()


def test_a_drain_ends_when_nobody_waits_for_it_any_more() -> None:
    harness = harness_with(8, drain_after=2)
    harness.add("runs", [1], max_tokens=40, adapter=adapter("a"))
    harness.add("late", [1], max_tokens=2, adapter=adapter("late"))
    for _ in range(5):
        harness.step()
    gate = harness.engine.scheduler.admission.gate
    assert gate.target == adapter("late")
    harness.add("more", [1], max_tokens=2, adapter=adapter("a"))
    harness.step()
    assert harness.running() == ["runs"]
    harness.engine.cancel([RequestId("late")])
    for _ in range(3):
        harness.step()
    assert gate.target is None
    assert "more" in harness.finished()


class Stubborn(ShadowResidency):
    """Ends a load only when asked again, and keeps the rows until then."""

    def tick(self) -> None:
        pass

    def prepare(self, adapter: AdapterRef) -> bool:
        if adapter.digest in self.loading:
            super().tick()
        return super().prepare(adapter)


def test_a_drain_gives_up_on_rows_that_do_not_come_free() -> None:
    residency = Stubborn(12, delay=4)
    harness = Harness(residency=residency, adapter_rank=12, drain_after=2)
    harness.add("small", [1], max_tokens=8, adapter=adapter("a", 4))
    for _ in range(6):
        harness.step()
    harness.add("other", [1], max_tokens=2, adapter=adapter("b", 8))
    harness.add("large", [1], max_tokens=2, adapter=adapter("c", 12))
    assert set(harness.run(most=400)) == {"small", "other", "large"}


def test_adapters_load_while_all_places_are_taken() -> None:
    harness = harness_with(32, delay=3, max_sequences=1)
    harness.add("runs", [1], max_tokens=10)
    for name in "ab":
        harness.add(name, [1], max_tokens=2, adapter=adapter(name))
    for _ in range(6):
        harness.step()
    assert harness.running() == ["runs"]
    assert set(harness.residency.loaded) == {"a", "b"}
    steps = harness.engine.stats().counters.steps
    harness.run()
    assert harness.engine.stats().counters.steps - steps == 4 + 2 + 2, "nobody waited for a load"


def test_a_failure_reaches_whoever_asks_first_and_the_next_one_too() -> None:
    gate = AdapterGate(ShadowResidency(8, broken={"bad": "adapter_invalid"}), 8, drain_after=3)
    for step in range(2):
        with pytest.raises(AdapterLoadError):
            gate.admits(adapter("bad"), step)
    assert gate.poll(2) == ([], []), "it is not asked for again"


def test_an_adapter_that_needs_all_other_memory_gets_its_turn() -> None:
    """Others come without end and leave it enough rows; only their pins keep it out."""
    residency = ShadowResidency(32)
    residency.large.add("large")
    harness = Harness(residency=residency, adapter_rank=32, drain_after=3)
    for count in range(40):
        harness.add(f"a{count}", [1, 2, 3], max_tokens=6, adapter=adapter("a"))
        harness.add(f"b{count}", [1, 2, 3], max_tokens=6, adapter=adapter("b"))
        if count == 3:
            harness.add("large", [1, 2, 3], max_tokens=2, adapter=adapter("large"))
        harness.step()
    assert "large" in harness.finished()
    harness.run()
