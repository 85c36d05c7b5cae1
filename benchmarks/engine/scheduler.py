"""Cost of one engine step without a model: scheduling, bookkeeping and outputs.

    python -m benchmarks.engine.scheduler [--running 256] [--waiting 1000] [--adapters 40]

Prints the median and the 99th percentile, in milliseconds of processor time, of steps in which
every running sequence decodes and the rest waits: the call of `schedule`, and all of the step
but the runner.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from worker.engine.config import SchedulerConfig
from worker.engine.engine import Engine
from worker.engine.null_runner import NullResidency, NullRunner
from worker.protocol.types import AdapterRef, RequestId, SamplingParams


class Letters:
    """A tokenizer whose cost is not part of the measurement: every token is one letter."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "a" * len(ids)

    def token_to_id(self, token: str) -> int | None:
        return None


def build(running: int, waiting: int, adapters: int, stream: bool) -> tuple[Engine, NullRunner]:
    config = SchedulerConfig(
        num_blocks=running * 96, max_sequences=running, adapter_rank=8 * max(1, adapters // 2)
    )
    runner, residency = NullRunner(50_000), NullResidency(config.adapter_rank)
    engine = Engine(config, runner, residency, Letters(), frozenset(), "benchmark")
    rng = random.Random(0)
    for number in range(running + waiting):
        prompt = [rng.randrange(50_000) for _ in range(rng.randrange(16, 512))]
        adapter = AdapterRef(str(number % adapters), 8) if adapters else None
        sampling = SamplingParams(max_tokens=512)
        request_id = RequestId(str(number))
        engine.add(request_id, prompt, sampling, adapter=adapter, stream=stream)
    return engine, runner


class Stopwatch:
    """Times calls of a function, in milliseconds of processor time."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.samples: list[float] = []

    def __call__(self, *arguments: Any) -> Any:
        begin = time.thread_time()
        result = self.function(*arguments)
        self.samples.append((time.thread_time() - begin) * 1000)
        return result


def measure(
    engine: Engine, runner: NullRunner, running: int, steps: int
) -> tuple[list[float], list[float]]:
    """Milliseconds of `schedule`, and of whole steps without the runner."""
    schedule = engine.scheduler.schedule = Stopwatch(engine.scheduler.schedule)
    execute = runner.execute = Stopwatch(runner.execute)
    step = Stopwatch(engine.step)
    for _ in range(1000):
        engine.step()
        stats = engine.stats()
        if stats.running == running and stats.step_tokens == running:
            break
    else:
        raise SystemExit("the engine never came to decode with all places taken")
    schedule.samples.clear()
    execute.samples.clear()
    for _ in range(steps):
        step()
    rest = zip(step.samples, execute.samples, strict=True)
    return schedule.samples, [whole - runner_part for whole, runner_part in rest]


def report(name: str, samples: list[float]) -> None:
    high = statistics.quantiles(samples, n=100)[98]
    print(f"{name:<28} median {statistics.median(samples):6.3f} ms   p99 {high:6.3f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--adapters", type=int, default=40)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    for stream in (False, True):
        engine, runner = build(options.running, options.waiting, options.adapters, stream)
        gc.collect()
        schedule, whole = measure(engine, runner, options.running, options.steps)
        label = "streamed" if stream else "not streamed"
        report(f"schedule, {label}", schedule)
        report(f"whole step, {label}", whole)


if __name__ == "__main__":
    main()
