"""The engine without a model gives repeatable answers, and its rank pool keeps its size."""

from __future__ import annotations

import pytest

from tests.engine.harness import Letters, adapter
from worker.engine.config import SchedulerConfig
from worker.engine.engine import Engine
from worker.engine.null_runner import NullResidency, NullRunner
from worker.engine.outputs import FinishedOutput
from worker.protocol.types import RequestId, SamplingParams


def answers(count: int, **options: int) -> dict[str, tuple[tuple[int, ...], ...]]:
    config = SchedulerConfig(num_blocks=40, block_size=4, adapter_rank=16, max_sequences=7)
    eos = frozenset({options["eos_token_id"]} if "eos_token_id" in options else ())
    runner = NullRunner(100, first_token=10, **options)
    engine = Engine(config, runner, NullResidency(16), Letters(), eos, "revision")
    for number in range(count):
        sampling = SamplingParams(max_tokens=12, n=2, seed=number)
        ref = adapter(str(number % 5)) if number % 2 else None
        engine.add(RequestId(str(number)), [number, 1, 2], sampling, adapter=ref, stream=False)
    finished = {}
    while engine.has_work():
        for output in engine.step():
            if isinstance(output, FinishedOutput):
                finished[output.request_id] = tuple(c.token_ids for c in output.choices)
    return finished


def test_answers_depend_on_the_request_alone() -> None:
    many, few = answers(40), answers(3)
    assert {name: many[name] for name in few} == few
    assert len(set(many.values())) == 40
    assert all(len(set(choices)) == 2 for choices in many.values())
    tokens = {token for choices in many.values() for choice in choices for token in choice}
    assert min(tokens) >= 10
    assert max(tokens) < 100


def test_answers_end_by_chance_when_asked_to() -> None:
    lengths = [
        len(c) for choices in answers(100, eos_token_id=2, mean_tokens=4).values() for c in choices
    ]
    assert min(lengths) == 1
    assert max(lengths) == 12
    assert 2.5 < sum(lengths) / len(lengths) < 5


def test_nothing_to_choose_from_is_refused() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        NullRunner(10, first_token=10)


def test_the_rank_pool_evicts_the_least_recently_used_that_nobody_pins() -> None:
    pool = NullResidency(24)
    for name in "abc":
        assert pool.prepare(adapter(name))
    pool.pin(adapter("a"))
    assert pool.prepare(adapter("b"))
    assert pool.free_rank() == 16
    assert pool.prepare(adapter("d"))
    assert pool.resident() == ("a", "b", "d")
    assert not pool.prepare(adapter("e", 17))
    pool.unpin(adapter("a"))
    assert pool.free_rank() == 24
    with pytest.raises(ValueError, match="not pinned"):
        pool.unpin(adapter("a"))
    with pytest.raises(ValueError, match="not ready"):
        pool.pin(adapter("c"))
