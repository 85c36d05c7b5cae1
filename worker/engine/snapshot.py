"""One moment of an engine, in plain numbers."""

from __future__ import annotations

import dataclasses

from worker.engine.batch import ScheduledBatch
from worker.engine.latency import Latencies
from worker.engine.metrics import AdapterCounts, EngineStats, unused_slots
from worker.engine.scheduler import Scheduler


def engine_stats(
    scheduler: Scheduler, last: ScheduledBatch, adapters: AdapterCounts, latencies: Latencies
) -> EngineStats:
    """`last` is the batch of the last step."""
    config, blocks = scheduler.config, scheduler.blocks
    return EngineStats(
        counters=dataclasses.replace(scheduler.counters),
        blocks=config.num_blocks,
        block_size=config.block_size,
        blocks_used=blocks.num_held,
        blocks_cached=blocks.cache.num_unused + blocks.cache.num_kept,
        unused_slots=unused_slots(scheduler.running, config.block_size, len(config.windows)),
        evictions=blocks.evictions,
        running=len(scheduler.running),
        waiting=len(scheduler.admission.queue),
        step_tokens=last.num_tokens,
        step_sequences=len(last.sequences),
        token_budget=config.token_budget,
        max_sequences=config.max_sequences,
        adapters=adapters,
        latency=latencies.snapshot(),
    )
