"""Decisions of single steps: order, budget, memory, preemption, policies and batching modes."""

from __future__ import annotations

import pytest

from tests.engine.harness import Harness
from worker.engine.config import SchedulerConfig


def shares(harness: Harness) -> dict[str, int]:
    """Tokens that each request got in the last step."""
    return {s.sequence.request_id: s.num_tokens for s in harness.runner.batches[-1].sequences}


def test_a_long_prompt_is_read_in_chunks_beside_decodes() -> None:
    harness = Harness(token_budget=10)
    harness.add("short", [1, 2], max_tokens=20)
    harness.step()
    harness.add("long", range(25), max_tokens=2)
    chunks = []
    for _ in range(3):
        harness.step()
        chunks.append(shares(harness))
    assert chunks == [{"short": 1, "long": 9}] * 2 + [{"short": 1, "long": 7}]


def test_prefill_first_lets_decodes_wait_but_not_for_ever() -> None:
    harness = Harness(token_budget=4, policy="prefill_first", num_blocks=200)
    harness.add("decodes", [1], max_tokens=50)
    harness.step()
    for number in range(40):
        harness.add(str(number), range(4), max_tokens=1, stream=False)
    served = []
    for _ in range(20):
        harness.step()
        served.append("decodes" in shares(harness))
    assert served == ([False] * 8 + [True]) * 2 + [False] * 2


def test_waiting_served_ratio_decides_who_goes_first() -> None:
    harness = Harness(token_budget=4, policy="prefill_first", waiting_served_ratio=1.0)
    for name in ("one", "two"):
        harness.add(name, [1, 2], max_tokens=20)
    harness.step()
    harness.add("three", range(8), max_tokens=2)
    harness.step()
    assert shares(harness) == {"one": 1, "two": 1, "three": 2}
    harness.add("four", range(8), max_tokens=2)
    harness.step()
    assert shares(harness) == {"three": 4}


def test_a_budget_smaller_than_the_decodes_is_shared_in_turn() -> None:
    harness = Harness(token_budget=2, policy="prefill_first")
    for number in range(5):
        harness.add(str(number), [number], max_tokens=30)
    for _ in range(40):
        harness.step()
    lengths = [len(s.output_ids) for s in harness.engine.scheduler.running]
    assert len(lengths) == 5
    assert max(lengths) - min(lengths) <= 3


def test_classes_then_arrival() -> None:
    harness = Harness(max_sequences=1)
    for name, priority in (("batch", 2), ("standard", 1), ("interactive", 0), ("second", 0)):
        harness.add(name, [1], max_tokens=1, priority=priority)
    harness.run()
    assert list(harness.finished()) == ["interactive", "second", "standard", "batch"]


def test_a_class_is_overtaken_only_so_often() -> None:
    harness = Harness(max_sequences=1, class_headstart=10)
    harness.add("batch", [1], max_tokens=1, priority=2)
    for number in range(60):
        harness.add(str(number), [1], max_tokens=1)
        harness.step()
    order = list(harness.finished())
    assert order.index("batch") == 19, "the twentieth would arrive at its place in line"


def test_admission_keeps_under_the_watermark() -> None:
    harness = Harness(num_blocks=20, watermark=0.5)
    harness.add("one", range(16), max_tokens=5)
    harness.add("two", range(50, 66), max_tokens=5)
    harness.add("three", range(90, 98), max_tokens=5)
    harness.step()
    assert harness.running() == ["one", "two"]
    assert harness.engine.scheduler.blocks.num_used + harness.engine.scheduler.outstanding() == 10
    harness.run()


def test_the_first_in_line_is_not_passed_over_for_lack_of_memory() -> None:
    harness = Harness(num_blocks=20)
    harness.add("runs", range(40), max_tokens=8)
    harness.add("large", range(50, 90), max_tokens=8)
    harness.add("small", [1], max_tokens=1)
    harness.step()
    assert harness.running() == ["runs"]
    harness.run()
    assert list(harness.finished()) == ["runs", "small", "large"]


def test_memory_that_is_in_use_already_is_not_counted_twice() -> None:
    harness = Harness(num_blocks=20, watermark=0.75)
    harness.add("one", range(40), max_tokens=8)  # twelve blocks, ten of them prompt
    harness.add("two", range(40), max_tokens=8)  # three more: nine are shared
    harness.add("three", range(40), max_tokens=8)
    harness.step()
    harness.step()
    assert harness.running() == ["one", "two"]
    harness.run()


def test_one_alone_may_pass_the_watermark() -> None:
    harness = Harness(num_blocks=10, watermark=0.3)
    harness.add("large", range(30), max_tokens=8)
    assert "large" in harness.run()


def test_prediction_decides_how_many_run_at_once() -> None:
    counts = []
    for predicted in (4, 40):
        harness = Harness(num_blocks=40)
        for number in range(8):
            harness.add(str(number), [number] * 8, max_tokens=40, predicted_output=predicted)
        harness.step()
        counts.append(len(harness.running()))
        harness.run()
    assert counts == [8, 3]


def test_the_newest_of_the_lowest_class_is_preempted_and_answers_stay_the_same() -> None:
    harness = Harness(num_blocks=12, watermark=1.0)
    for name, priority in (("urgent", 0), ("old", 1), ("new", 1)):
        prompt = [len(name)] * 8
        harness.add(name, prompt, max_tokens=24, priority=priority, predicted_output=1)
    while not harness.engine.counters.preemptions:
        harness.step()
    assert harness.running() == ["urgent", "old"]
    waiting = list(harness.engine.scheduler.admission.queue)
    assert [s.request_id for s in waiting] == ["new"]
    kept = list(waiting[0].output_ids)
    assert kept
    harness.run()
    for name in ("urgent", "old", "new"):
        assert harness.answers(name) == [harness.runner.expected((len(name),) * 8, "", 0, 24)]
    assert harness.answers("new")[0][: len(kept)] == kept


def test_who_was_given_a_token_in_this_step_may_still_be_preempted_in_it() -> None:
    harness = Harness(num_blocks=6, watermark=1.0, prefix_caching=False)
    harness.add("low", [1] * 5, max_tokens=16, predicted_output=1, priority=2)
    harness.step()
    harness.add("high", [2] * 8, max_tokens=14, predicted_output=1)
    while not harness.engine.counters.preemptions:
        assert next(iter(shares(harness))) == "low", "it stands first in the batch"
        harness.step()
    assert shares(harness) == {"high": 1}
    harness.run()
    assert harness.answers("low") == [harness.runner.expected((1,) * 5, "", 0, 16)]


def test_a_preempted_answer_comes_back_from_the_cache_where_it_still_is() -> None:
    harness = Harness(num_blocks=12, watermark=1.0)
    for name in ("old", "new"):
        harness.add(
            name, [len(name)] * 16, max_tokens=16, predicted_output=1, priority=name == "new"
        )
    harness.add("last", [9] * 8, max_tokens=16, predicted_output=1, priority=2)
    harness.run(most=300)
    counters = harness.engine.counters
    assert counters.preemptions > 0
    recomputed = counters.prefill_tokens - 40
    assert recomputed < counters.discarded_tokens


def test_preemption_does_not_thrash() -> None:
    """A sequence that outgrew its prediction comes back only with room to grow."""
    harness = Harness(num_blocks=30, watermark=1.0)
    for number in range(12):
        harness.add(str(number), [number] * 8, max_tokens=60, predicted_output=1)
    harness.run()
    assert harness.engine.counters.preemptions <= 21


def test_static_runs_a_batch_to_its_end_before_the_next() -> None:
    harness = Harness(mode="static", batch_size=2)
    for name, tokens in (("a", 2), ("b", 6), ("c", 2), ("d", 2)):
        harness.add(name, [1], max_tokens=tokens)
    groups = []
    while harness.engine.has_work():
        harness.step()
        groups.append("".join(shares(harness)))
    assert groups == ["ab", "ab", "b", "b", "b", "b", "cd", "cd"]


def test_static_takes_what_is_there_and_nobody_later() -> None:
    harness = Harness(mode="static", batch_size=4)
    harness.add("a", [1], max_tokens=4)
    harness.step()
    harness.add("b", [1], max_tokens=1)
    for _ in range(3):
        harness.step()
        assert shares(harness) == {"a": 1}
    harness.step()
    assert "b" in harness.finished()


def test_who_is_preempted_belongs_to_its_batch_still() -> None:
    harness = Harness(mode="static", batch_size=3, num_blocks=14, watermark=1.0)
    for name, tokens in (("a", 30), ("b", 13), ("c", 14), ("d", 2)):
        harness.add(name, [ord(name)] * 8, max_tokens=tokens, predicted_output=1)
    while not harness.engine.counters.preemptions:
        harness.step()
    assert harness.running() == ["a", "b"]
    while "c" not in harness.running():
        harness.step()
    assert "a" in harness.running()
    harness.run()
    assert list(harness.finished()) == ["b", "c", "a", "d"]


def test_dynamic_waits_for_enough_or_long_enough() -> None:
    harness = Harness(mode="dynamic", batch_size=3, batch_wait=1.0)
    harness.add("a", [1], max_tokens=2)
    for _ in range(3):
        harness.step()
        assert harness.engine.stalled
    harness.clock.seconds = 1.0
    harness.step()
    assert shares(harness) == {"a": 1}
    harness.run()
    for name in "bcd":
        assert not harness.running()
        harness.add(name, [1], max_tokens=2)
        harness.step()
    assert set(shares(harness)) == {"b", "c", "d"}
    harness.run()


def test_a_batch_that_needs_several_steps_to_start_stays_together() -> None:
    harness = Harness(mode="static", batch_size=3, token_budget=4)
    for name in "abcd":
        harness.add(name, [ord(name)] * 4, max_tokens=6)
    for _ in range(5):
        harness.step()
    assert harness.running() == ["a", "b", "c"]
    harness.run()


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_blocks": 0},
        {"token_budget": 0},
        {"max_sequences": 0},
        {"watermark": 0.0},
        {"watermark": 1.1},
        {"context_tokens": 1},
        {"batch_size": 300},
        {"drain_after": -1},
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        SchedulerConfig(**{"num_blocks": 10, **wrong})
