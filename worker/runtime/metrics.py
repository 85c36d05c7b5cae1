"""The engine's numbers for Prometheus, served by a thread of their own.

A scrape reads what the engine published after its last step and never waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from worker.engine.latency import BOUNDS, Histogram
from worker.engine.metrics import EngineStats
from worker.runtime.errors import MetricsUnservable

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class EngineCollector(Collector):
    """Every family carries the label `model`."""

    def __init__(self, model: str, stats: Callable[[], EngineStats]) -> None:
        self._model = model
        self._stats = stats

    def collect(self) -> Iterator[Family]:
        stats = self._stats()
        for name, text, value in _gauges(stats):
            gauge = GaugeMetricFamily(f"batten_engine_{name}", text, labels=["model"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, text, label, values in _counters(stats):
            counter = CounterMetricFamily(f"batten_engine_{name}", text, labels=["model", label])
            for kind, value in values.items():
                counter.add_metric([self._model, kind], value)
            yield counter
        yield self._latency(stats)

    def _latency(self, stats: EngineStats) -> HistogramMetricFamily:
        family = HistogramMetricFamily(
            "batten_engine_request_seconds",
            "Seconds that finished requests spent in each phase",
            labels=["model", "phase"],
        )
        for phase, histogram in stats.latency.items():
            family.add_metric([self._model, phase], _buckets(histogram), histogram.total)
        return family


def serve_metrics(
    host: str, port: int, model: str, stats: Callable[[], EngineStats]
) -> tuple[int, Callable[[], None]]:
    """Answer GET /metrics on the port returned until the function returned is called.

    `port` 0 takes a free one. Raises MetricsUnservable.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(model, stats))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        reason = f"metrics cannot be served on {host}:{port}: {error.strerror or error}"
        raise MetricsUnservable(f"{reason} (--metrics-port, BATTEN_METRICS_PORT)") from error

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_port, stop


def _gauges(stats: EngineStats) -> list[tuple[str, str, float]]:
    return [
        ("memory_utilisation", "Share of the KV pool that sequences hold", stats.memory_use),
        ("memory_waste", "Share of held KV slots without a token", stats.waste),
        ("kv_blocks", "Blocks in the KV pool", stats.blocks),
        ("kv_blocks_cached", "Unused blocks that hold prefixes", stats.blocks_cached),
        ("batch_occupancy", "Sequences of the last step / most sequences", stats.batch_occupancy),
        ("token_occupancy", "Tokens of the last step / token budget", stats.occupancy),
        ("running", "Sequences that run", stats.running),
        ("waiting", "Sequences that wait", stats.waiting),
    ]


def _counters(stats: EngineStats) -> list[tuple[str, str, str, dict[str, float]]]:
    """(name, help, label, value by the label's value)"""
    c, adapters = stats.counters, stats.adapters
    return [
        (
            "tokens",
            "Tokens: computed for prompts and for answers, taken from the prefix cache, discarded "
            "by preemption, and chosen",
            "kind",
            {
                "prefill": c.prefill_tokens,
                "decode": c.decode_tokens,
                "prefix_hit": c.cached_tokens,
                "discarded": c.discarded_tokens,
                "output": c.output_tokens,
            },
        ),
        (
            "requests",
            "Requests that ended",
            "outcome",
            {"finished": c.finished, "failed": c.failed, "cancelled": c.cancelled},
        ),
        (
            "events",
            "What the scheduler did",
            "event",
            {
                "step": c.steps,
                "admission": c.admissions,
                "preemption": c.preemptions,
                "block_eviction": stats.evictions,
            },
        ),
        (
            "adapters",
            "Adapters loaded to the device, failed to load, evicted from it",
            "event",
            {
                "load": adapters.loads,
                "failure": adapters.failures,
                "eviction": adapters.evictions,
            },
        ),
    ]


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Cumulative, as Prometheus wants them."""
    names = [*map(str, BOUNDS), "+Inf"]
    return list(zip(names, accumulate(histogram.counts), strict=True))
