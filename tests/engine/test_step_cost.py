"""What a step costs does not depend on how many wait. Counted in calls, which no load changes."""

from __future__ import annotations

import sys
from types import FrameType

from tests.engine.harness import Letters
from worker.engine.config import SchedulerConfig
from worker.engine.engine import Engine
from worker.engine.null_runner import NullResidency, NullRunner
from worker.protocol.types import AdapterRef, RequestId, SamplingParams

RUNNING = 16


def calls_of_a_decode_step(waiting: int, adapters: int) -> int:
    """Python calls of a step in which all places are taken, with `waiting` behind them."""
    config = SchedulerConfig(num_blocks=4096, max_sequences=RUNNING, adapter_rank=8 * RUNNING)
    engine = Engine(
        config, NullRunner(26), NullResidency(8 * RUNNING), Letters(), frozenset(), "revision"
    )
    for number in range(RUNNING + waiting):
        adapter = AdapterRef(str(number % adapters), 8) if adapters else None
        prompt, sampling = range(number % 20, number % 20 + 9), SamplingParams(max_tokens=500)
        engine.add(RequestId(str(number)), prompt, sampling, adapter=adapter)
    for _ in range(100):  # past every drain and load
        engine.step()
    assert engine.stats().step_tokens == engine.stats().running == RUNNING
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    return calls


def test_a_step_costs_the_same_however_many_wait() -> None:
    few, many = calls_of_a_decode_step(50, 0), calls_of_a_decode_step(2000, 0)
    assert few == many < 40 * RUNNING


def test_also_when_they_wait_for_adapters() -> None:
    few, many = calls_of_a_decode_step(50, RUNNING), calls_of_a_decode_step(2000, RUNNING)
    assert few == many < 40 * RUNNING
