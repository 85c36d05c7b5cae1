"""Requests through the engine: what is refused, how answers end, what is reported and counted."""

from __future__ import annotations

import pytest

from tests.engine.harness import Harness, adapter
from tests.engine.shadow import ShadowRunner
from worker.engine.batch import SampledToken, ScheduledBatch
from worker.engine.errors import (
    CapacityExceeded,
    ContextLengthExceeded,
    InvalidRequest,
    RequestRefused,
)
from worker.engine.outputs import (
    CancelledOutput,
    DeltaOutput,
    FailedOutput,
    FinishedOutput,
    StartedOutput,
)
from worker.protocol.types import RequestId, SamplingParams, TokenLogprob


class Scripted:
    """Says the given tokens, whatever it is asked."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def execute(self, batch: ScheduledBatch) -> list[SampledToken]:
        return [
            SampledToken(
                self.tokens[len(s.sequence.output_ids)],
                TokenLogprob(self.tokens[len(s.sequence.output_ids)], -0.5),
            )
            for s in batch.sequences
            if s.samples
        ]


def scripted(text: str, **options: object) -> Harness:
    harness = Harness(eos=frozenset({25}), **options)  # Z ends an answer
    harness.engine._runner = Scripted([ord(letter) - ord("A") for letter in text])
    return harness


def test_a_request_alone_gives_the_models_answer() -> None:
    harness = Harness()
    harness.add("one", [1, 2, 3], max_tokens=6)
    harness.run()
    assert harness.answers("one") == [harness.runner.expected((1, 2, 3), "", 0, 6)]


def test_outputs_come_in_order_and_deltas_add_up() -> None:
    harness = Harness()
    harness.add("one", range(10), max_tokens=5)
    harness.run()
    assert isinstance(harness.outputs[0], StartedOutput)
    assert isinstance(harness.outputs[-1], FinishedOutput)
    deltas = harness.of(DeltaOutput)
    choice = harness.finished()["one"].choices[0]
    assert [delta.index for delta in deltas] == list(range(5))
    assert tuple(t for delta in deltas for t in delta.token_ids) == choice.token_ids
    assert "".join(delta.text for delta in deltas) == choice.text


def test_nobody_reads_along() -> None:
    harness = Harness()
    harness.add("one", range(10), max_tokens=5, stream=False)
    harness.run()
    assert harness.of(DeltaOutput) == []
    assert len(harness.finished()["one"].choices[0].text) == 5


@pytest.mark.parametrize(
    ("prompt", "options", "error", "code"),
    [
        ([], {}, InvalidRequest, "invalid_request"),
        ([1], {"sampling": SamplingParams(max_tokens=0)}, InvalidRequest, "invalid_request"),
        ([1], {"sampling": SamplingParams(max_tokens=1, n=0)}, InvalidRequest, "invalid_request"),
        (range(200), {}, ContextLengthExceeded, "context_length_exceeded"),
        (range(100), {"max_tokens": 90}, CapacityExceeded, "capacity_exceeded"),
        ([1], {"adapter": adapter("big", 300)}, CapacityExceeded, "capacity_exceeded"),
    ],
)
def test_refusals_name_their_reason(
    prompt: object, options: dict[str, object], error: type[RequestRefused], code: str
) -> None:
    harness = Harness(num_blocks=32)
    with pytest.raises(error) as caught:
        harness.add("bad", prompt, **options)
    assert caught.value.code == code
    assert not harness.engine.has_work()


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    harness = Harness()
    harness.add("one", [1])
    with pytest.raises(InvalidRequest, match="already here"):
        harness.add("one", [1])
    harness.run()
    harness.add("one", [1])
    harness.run()
    assert len(harness.of(FinishedOutput)) == 2


def test_what_just_fits_the_pool_runs() -> None:
    harness = Harness(num_blocks=4, block_size=4)
    harness.add("full", range(10), max_tokens=7)  # 16 tokens with KV, and the last one without
    harness.run()
    assert harness.answers("full") == [harness.runner.expected(tuple(range(10)), "", 0, 7)]
    with pytest.raises(CapacityExceeded):
        harness.add("more", range(10), max_tokens=8)


def test_end_of_sequence_counts_and_has_no_text() -> None:
    harness = scripted("ABZ")
    harness.add("one", [1, 2], max_tokens=10)
    finished = harness.run()["one"]
    assert finished.choices[0].text == "AB"
    assert finished.choices[0].token_ids == (0, 1, 25)
    assert finished.choices[0].finish_reason == "stop"
    assert finished.usage.completion == 3


def test_ignored_end_of_sequence_is_a_token_like_others() -> None:
    harness = scripted("ABZCD")
    harness.add("one", [1], sampling=SamplingParams(max_tokens=5, ignore_eos=True))
    choice = harness.run()["one"].choices[0]
    assert (choice.text, choice.finish_reason) == ("ABZCD", "length")


def test_the_context_ends_an_answer() -> None:
    harness = Harness(context_tokens=12)
    harness.add("one", range(8), max_tokens=100)
    choice = harness.run()["one"].choices[0]
    assert (len(choice.token_ids), choice.finish_reason) == (4, "length")


def test_stop_string_across_tokens_is_never_shown() -> None:
    harness = scripted("ABCDEF")
    harness.add("one", [1], sampling=SamplingParams(max_tokens=6, stop=("CDE", "X")))
    choice = harness.run()["one"].choices[0]
    assert (choice.text, choice.finish_reason) == ("AB", "stop")
    assert choice.token_ids == (0, 1, 2, 3, 4)
    assert "".join(delta.text for delta in harness.of(DeltaOutput)) == "AB"


def test_the_beginning_of_a_stop_string_is_text_in_the_end() -> None:
    harness = scripted("ABCD")
    harness.add("one", [1], sampling=SamplingParams(max_tokens=4, stop=("CDE",)))
    choice = harness.run()["one"].choices[0]
    assert (choice.text, choice.finish_reason) == ("ABCD", "length")
    assert [delta.text for delta in harness.of(DeltaOutput)] == ["A", "B", "", "CD"]


def test_logprobs_only_when_asked() -> None:
    harness = scripted("ABC")
    harness.add("with", [1], sampling=SamplingParams(max_tokens=3, logprobs=0))
    harness.add("without", [1], sampling=SamplingParams(max_tokens=3))
    finished = harness.run()
    logprobs = finished["with"].choices[0].logprobs
    assert logprobs == tuple(TokenLogprob(token, -0.5) for token in (0, 1, 2))
    assert finished["without"].choices[0].logprobs is None


def test_choices_differ_and_share_their_prompt() -> None:
    harness = Harness()
    prompt = tuple(range(22))
    harness.add("three", prompt, sampling=SamplingParams(max_tokens=5, n=3))
    finished = harness.run()["three"]
    assert [choice.index for choice in finished.choices] == [0, 1, 2]
    assert harness.answers("three") == [harness.runner.expected(prompt, "", c, 5) for c in range(3)]
    assert (finished.usage.prompt, finished.usage.completion) == (22, 15)
    assert finished.usage.cached == 0
    # 22 for the first choice; the others find five full blocks and compute the last two tokens.
    assert harness.engine.stats().counters.prefill_tokens == 22 + 2 * 2


def test_a_poisoned_answer_fails_alone_and_is_not_shared() -> None:
    harness = Harness()
    harness.runner.poisoned.add("bad")
    harness.add("bad", range(12), sampling=SamplingParams(max_tokens=4, n=2))
    harness.add("good", [7, 8, 9], max_tokens=4)
    harness.run()
    failures = harness.of(FailedOutput)
    assert [(f.request_id, f.code, f.retryable) for f in failures] == [
        ("bad", "numerical_error", False)
    ]
    assert "good" in harness.finished()
    harness.add("again", range(12))
    assert harness.run()["again"].usage.cached == 0


def test_cancel_while_waiting_running_and_gone() -> None:
    harness = Harness(max_sequences=1)
    harness.add("runs", range(9), max_tokens=50)
    harness.add("waits", range(9), max_tokens=50)
    harness.add("stays", [3], max_tokens=2)
    harness.step()
    harness.step()
    harness.engine.cancel([RequestId(name) for name in ("runs", "waits", "unknown")])
    harness.check()
    harness.run()
    assert [output.request_id for output in harness.of(CancelledOutput)] == ["runs", "waits"]
    assert list(harness.finished()) == ["stays"]


def test_cancelled_before_the_first_step() -> None:
    harness = Harness()
    harness.add("one", [1, 2])
    harness.engine.cancel([RequestId("one")])
    assert harness.engine.has_work()
    assert harness.step() == [CancelledOutput(RequestId("one"))]
    assert not harness.engine.has_work()


def test_a_runners_exception_passes_and_the_step_can_be_repeated() -> None:
    class Flaky(ShadowRunner):
        failures = 2

        def execute(self, batch: ScheduledBatch) -> list[SampledToken]:
            if len(self.batches) == 3 and self.failures:
                self.failures -= 1
                raise RuntimeError("device lost")
            return super().execute(batch)

    harness = Harness()
    flaky = harness.runner = harness.engine._runner = Flaky(harness.config.block_size)
    harness.add("one", range(9), max_tokens=8)
    for _ in range(3):
        harness.step()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="device lost"):
            harness.step()
        harness.check()
    harness.run()
    assert harness.answers("one") == [flaky.expected(tuple(range(9)), "", 0, 8)]


def test_capacity_is_net_of_promises_and_of_those_who_wait() -> None:
    harness = Harness(num_blocks=100, watermark=0.9, max_sequences=8, adapter_rank=32)
    empty = harness.engine.capacity()
    assert (empty.kv_tokens, empty.adapter_rank, empty.requests, empty.running) == (400, 32, 8, 0)
    harness.add("one", range(20), max_tokens=21, adapter=adapter("a", 8))
    waiting = harness.engine.capacity()
    assert (waiting.kv_tokens, waiting.adapter_rank) == (360 - 40, 24)
    harness.step()
    running = harness.engine.capacity()
    assert (running.kv_tokens, running.adapter_rank, running.requests) == (360 - 40, 24, 7)
    assert (running.running, running.resident) == (1, ("a",))
    harness.run()
    assert harness.engine.capacity().kv_tokens == 400


def test_limits_are_what_a_request_may_need() -> None:
    limits = Harness(num_blocks=10, block_size=4, adapter_rank=16).engine.limits()
    assert (limits.context_tokens, limits.kv_tokens, limits.adapter_rank) == (200, 40, 16)


def test_counters_tell_what_was_computed() -> None:
    harness = Harness()
    harness.add("one", range(8), max_tokens=4)
    harness.run()
    harness.add("two", range(8), max_tokens=4)
    harness.run()
    stats = harness.engine.stats()
    counters = stats.counters
    assert (counters.prefill_tokens, counters.decode_tokens) == (8 + 4, 3 + 3)
    assert (counters.cached_tokens, counters.output_tokens) == (4, 8)
    assert (counters.finished, counters.admissions, counters.preemptions) == (2, 2, 0)
    assert counters.prefill_tokens + counters.decode_tokens == harness.runner.computed
    assert stats.memory_use == 0
