"""What an engine has done, in plain numbers. Whoever exports them knows their names elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from worker.engine.latency import Histogram, Phase
from worker.engine.sequence import Sequence


@dataclass(slots=True)
class EngineCounters:
    """Totals since start; they only grow.

    `prefill_tokens` were computed to read a prompt (or to replay an answer after preemption),
    `decode_tokens` to continue an answer. `cached_tokens` were taken from the prefix cache
    instead. `discarded_tokens` had been computed when their sequence was preempted.
    `allocated_slots` and `unused_slots` sum, over the steps, the token slots that sequences held
    and those of them that no token filled yet.
    """

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    discarded_tokens: int = 0
    preemptions: int = 0
    admissions: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    allocated_slots: int = 0
    unused_slots: int = 0

    @property
    def waste(self) -> float:
        """Mean share of allocated slots that held nothing, weighted by memory and steps."""
        return self.unused_slots / self.allocated_slots if self.allocated_slots else 0.0


@dataclass(frozen=True, slots=True)
class AdapterCounts:
    """Totals since start. `evictions` made room on the device; host memory may keep the rest."""

    loads: int = 0
    failures: int = 0
    evictions: int = 0


def unused_slots(running: Iterable[Sequence], block_size: int, groups: int) -> int:
    """Slots in held blocks without a token. Only full blocks are shared, so none counts twice."""
    return groups * sum(len(s.block_table) * block_size - s.num_computed for s in running)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """One moment. Blocks: `used` by sequences (shared ones once), `cached` and unused, the rest
    empty. `unused_slots` lie in used blocks and hold no token yet."""

    counters: EngineCounters
    blocks: int
    block_size: int
    blocks_used: int
    blocks_cached: int
    unused_slots: int
    evictions: int
    running: int
    waiting: int
    step_tokens: int
    step_sequences: int
    token_budget: int
    max_sequences: int
    adapters: AdapterCounts = AdapterCounts()
    latency: Mapping[Phase, Histogram] = field(default_factory=dict)

    @property
    def memory_use(self) -> float:
        """Share of the KV pool that running sequences hold."""
        return self.blocks_used / self.blocks

    @property
    def waste(self) -> float:
        """(allocated - used slots) / allocated, now."""
        slots = self.blocks_used * self.block_size
        return self.unused_slots / slots if slots else 0.0

    @property
    def batch_occupancy(self) -> float:
        """Share of the places for sequences that the last step filled."""
        return self.step_sequences / self.max_sequences

    @property
    def occupancy(self) -> float:
        """Share of the last step's token budget that was computed."""
        return self.step_tokens / self.token_budget
