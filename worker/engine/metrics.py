"""What an engine has done, in plain numbers. Whoever exports them knows their names elsewhere."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EngineCounters:
    """Totals since start; they only grow.

    `prefill_tokens` were computed to read a prompt (or to replay an answer after preemption),
    `decode_tokens` to continue an answer. `cached_tokens` were taken from the prefix cache
    instead. `discarded_tokens` had been computed when their sequence was preempted.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """One moment. Blocks: `used` by sequences, `cached` and unused, the rest empty."""

    counters: EngineCounters
    blocks: int
    blocks_used: int
    blocks_cached: int
    evictions: int
    running: int
    waiting: int
    step_tokens: int
    step_sequences: int
    token_budget: int

    @property
    def memory_use(self) -> float:
        """Share of the KV pool that running sequences hold."""
        return self.blocks_used / self.blocks

    @property
    def occupancy(self) -> float:
        """Share of the last step's token budget that was computed."""
        return self.step_tokens / self.token_budget
