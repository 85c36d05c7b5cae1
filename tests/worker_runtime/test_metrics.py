"""What a scrape of a worker says, against what its engine did."""

from __future__ import annotations

import socket
from collections.abc import Callable
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from worker.engine.config import SchedulerConfig
from worker.engine.engine import Engine
from worker.engine.latency import BOUNDS
from worker.engine.null_runner import NullResidency, NullRunner
from worker.protocol.types import AdapterRef, RequestId, SamplingParams
from worker.runtime.errors import MetricsUnservable
from worker.runtime.metrics import serve_metrics
from worker.runtime.stats import rates

Sample = Callable[..., float]


class NoText:
    def decode(self, ids: object, skip_special_tokens: bool = True) -> str:
        return ""

    def token_to_id(self, token: str) -> int | None:
        return None


class Clock:
    """A second passes with each look."""

    seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1.0
        return self.seconds


@pytest.fixture
def engine() -> Engine:
    config = SchedulerConfig(
        num_blocks=64, block_size=4, max_sequences=2, adapter_rank=8, context_tokens=100
    )
    return Engine(config, NullRunner(50), NullResidency(8), NoText(), frozenset(), "r", now=Clock())


def add(engine: Engine, name: str, adapter: str | None = None) -> None:
    ref = None if adapter is None else AdapterRef(adapter, 8)
    engine.add(RequestId(name), range(1, 10), SamplingParams(max_tokens=3), adapter=ref)


def scrape(port: int) -> Sample:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    families = text_string_to_metric_families(text)
    samples = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }

    def value(name: str, **labels: str) -> float:
        return samples[f"batten_engine_{name}", frozenset({"model": "m", **labels}.items())]

    return value


def test_a_scrape_tells_what_the_engine_did(engine: Engine) -> None:
    port, stop = serve_metrics("127.0.0.1", 0, "m", engine.stats)
    try:
        for name, adapter in (("a", None), ("b", "x"), ("c", "y")):
            add(engine, name, adapter)
            while engine.has_work():
                engine.step()
        value = scrape(port)
    finally:
        stop()
    assert value("tokens_total", kind="output") == 9
    assert value("tokens_total", kind="prefill") == 27
    assert value("tokens_total", kind="decode") == 6
    assert value("requests_total", outcome="finished") == 3
    assert value("adapters_total", event="load") == 2
    assert value("adapters_total", event="eviction") == 1
    assert value("memory_utilisation") == 0
    assert value("batch_occupancy") == 0.5
    assert value("request_seconds_count", phase="e2e") == 3
    # Each request is added at t; its three steps look at t+1, t+2 | t+3, t+4 | t+5, t+6.
    assert value("request_seconds_sum", phase="queue") == 3 * 1
    assert value("request_seconds_sum", phase="prefill") == 3 * 1
    assert value("request_seconds_sum", phase="decode") == 3 * 4
    assert value("request_seconds_sum", phase="e2e") == 3 * 6
    assert value("request_seconds_bucket", phase="decode", le=str(BOUNDS[8])) == 0
    assert value("request_seconds_bucket", phase="decode", le="+Inf") == 3


def test_a_scrape_tells_of_memory_that_was_too_small() -> None:
    config = SchedulerConfig(num_blocks=9, block_size=4, watermark=1.0, context_tokens=100)
    tight = Engine(config, NullRunner(50), NullResidency(8), NoText(), frozenset(), "r")
    port, stop = serve_metrics("127.0.0.1", 0, "m", tight.stats)
    try:
        for number in range(3):
            prompt, sampling = range(number, number + 9), SamplingParams(max_tokens=20)
            tight.add(RequestId(str(number)), prompt, sampling, predicted_output=1)
        seen: list[float] = []
        while tight.has_work():
            tight.step()
            seen.append(scrape(port)("memory_utilisation"))
        value = scrape(port)
    finally:
        stop()
    assert max(seen) == 1
    assert value("events_total", event="preemption") == tight.counters.preemptions > 0
    assert value("events_total", event="block_eviction") > 0
    assert value("events_total", event="step") == len(seen)
    assert value("tokens_total", kind="prefix_hit") == tight.counters.cached_tokens > 0
    assert value("tokens_total", kind="discarded") == tight.counters.discarded_tokens > 0


def test_waste_counts_shared_blocks_once(engine: Engine) -> None:
    add(engine, "a")
    engine.step()
    stats = engine.stats()
    assert (stats.blocks_used, stats.unused_slots) == (3, 3)  # 9 tokens in 3 blocks of 4
    add(engine, "b")
    engine.step()
    stats = engine.stats()
    # The first two blocks are shared; a has 10 tokens, b the 9 of its prompt.
    assert (stats.blocks_used, stats.unused_slots) == (4, 2 + 3)
    assert stats.waste == 5 / 16
    assert stats.counters.waste == (3 + 5) / (12 + 16)


def test_the_log_line_names_what_happened_between_two_moments(engine: Engine) -> None:
    before = engine.stats()
    add(engine, "a", "x")
    while engine.has_work():
        engine.step()
    line = rates(before, engine.stats(), 2.0)
    assert line["output_tokens_per_s"] == 1.5
    assert line["adapter_loads"] == 1
    assert (line["queue_s"], line["prefill_s"], line["decode_s"], line["e2e_s"]) == (1, 1, 4, 6)
    assert 0 < line["kv_waste"] < 0.5


def test_a_taken_port_is_said_to_be(engine: Engine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MetricsUnservable, match=f"127.0.0.1:{port}.*BATTEN_METRICS_PORT"):
            serve_metrics("127.0.0.1", port, "m", engine.stats)
