"""What an engine is told at start. All sizes are tokens, blocks or bytes, never fractions of
unknown things: whoever measured the device decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BatchingMode = Literal["continuous", "dynamic", "static"]
SchedulingPolicy = Literal["decode_first", "prefill_first"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one engine's schedule.

    `token_budget`: most tokens computed in one step. `max_sequences`: most sequences running at
    once. `watermark`: share of KV blocks that admission may promise (running sequences may use
    the rest). `adapter_rank`: rows of the rank pool.
    """

    num_blocks: int
    block_size: int = 16
    token_budget: int = 2048
    max_sequences: int = 256
    watermark: float = 0.9
    adapter_rank: int = 256
    context_tokens: int = 8192
    mode: BatchingMode = "continuous"
    policy: SchedulingPolicy = "decode_first"

    def __post_init__(self) -> None:
        if self.num_blocks < 1 or self.block_size < 1:
            raise ValueError(f"no KV blocks: {self.num_blocks} of {self.block_size} tokens")
        if self.token_budget < 1 or self.max_sequences < 1:
            raise ValueError("token_budget and max_sequences must be at least 1")
        if not 0 < self.watermark <= 1:
            raise ValueError(f"watermark {self.watermark} is not in (0, 1]")
