"""One line every few seconds that says how the engine does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import structlog

from worker.engine.latency import Phase
from worker.engine.metrics import EngineCounters, EngineStats
from worker.runtime.worker import Worker

_log = structlog.get_logger(__name__)

SECONDS = 10.0


async def report(worker: Worker, seconds: float = SECONDS) -> None:
    """Silent while nothing happens."""
    before, since = worker.thread.published.stats, time.monotonic()
    while True:
        await asyncio.sleep(seconds)
        stats, now = worker.thread.published.stats, time.monotonic()
        if stats.counters.steps != before.counters.steps:
            _log.info("engine_stats", held=len(worker.held), **rates(before, stats, now - since))
        before, since = stats, now


def rates(before: EngineStats, after: EngineStats, seconds: float) -> dict[str, float]:
    """What happened between two moments.

    Tokens per second; the share of prompt tokens that came from the prefix cache; the mean share
    of held KV slots without a token (`kv_waste`); mean seconds of finished requests by phase.
    """
    a, b = before.counters, after.counters
    prefill, cached = b.prefill_tokens - a.prefill_tokens, b.cached_tokens - a.cached_tokens
    return {
        "output_tokens_per_s": round((b.output_tokens - a.output_tokens) / seconds, 1),
        "prefill_tokens_per_s": round(prefill / seconds, 1),
        "finished": b.finished - a.finished,
        "running": after.running,
        "waiting": after.waiting,
        "preemptions": b.preemptions - a.preemptions,
        "kv_use": round(after.memory_use, 3),
        "prefix_hit": round(cached / (prefill + cached), 3) if prefill + cached else 0.0,
        "kv_waste": round(_waste(a, b), 4),
        "occupancy": round(after.occupancy, 3),
        "batch_occupancy": round(after.batch_occupancy, 3),
        "adapter_loads": after.adapters.loads - before.adapters.loads,
        "adapter_evictions": after.adapters.evictions - before.adapters.evictions,
        **{f"{phase}_s": round(mean, 3) for phase, mean in _phases(before, after)},
    }


def _waste(before: EngineCounters, after: EngineCounters) -> float:
    allocated = after.allocated_slots - before.allocated_slots
    return (after.unused_slots - before.unused_slots) / allocated if allocated else 0.0


def _phases(before: EngineStats, after: EngineStats) -> Iterator[tuple[Phase, float]]:
    for phase, histogram in after.latency.items():
        earlier = before.latency[phase]
        if count := histogram.count - earlier.count:
            yield phase, (histogram.total - earlier.total) / count
