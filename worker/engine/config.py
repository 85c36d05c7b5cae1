"""What an engine is told at start. All sizes are tokens, blocks or bytes, never fractions of
unknown things: whoever measured the device decides."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal

BatchingMode = Literal["continuous", "dynamic", "static"]
SchedulingPolicy = Literal["decode_first", "prefill_first"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one engine's schedule.

    `token_budget`: most tokens computed in one step. `max_sequences`: most sequences running at
    once. `watermark`: share of KV blocks that admission may promise (running sequences may use
    the rest). `adapter_rank`: rows of the rank pool. `vocabulary`: the ids of a prompt's tokens
    are below it (0: not checked).

    `windows`: of each KV group, how many tokens its layers see, their own included; None: all. A
    sequence keeps a block table per group, and gives up blocks that no later token of it sees.
    All groups take their blocks from the one pool of `num_blocks`.

    `pinned_share`: share of the blocks that may be kept for prefixes shared among tenants; no
    single request may need them. `prefix_caching`: full blocks are found again by their content.
    `drain_after`: steps after which an adapter that lacks rank rows has others drained for it.
    `class_headstart`: a request is overtaken by at most this many later ones for each class that
    they are more urgent.
    `waiting_served_ratio`: `prefill_first` lets decodes wait only while at least this many
    sequences want prefill for each one that decodes. `batch_size` (0: `max_sequences`) and
    `batch_wait` (seconds) form the batches of the dynamic and static modes.
    """

    num_blocks: int
    block_size: int = 16
    windows: tuple[int | None, ...] = (None,)
    token_budget: int = 2048
    max_sequences: int = 256
    watermark: float = 0.9
    adapter_rank: int = 256
    context_tokens: int = 8192
    vocabulary: int = 0
    mode: BatchingMode = "continuous"
    policy: SchedulingPolicy = "decode_first"
    prefix_caching: bool = True
    pinned_share: float = 0.0
    drain_after: int = 64
    class_headstart: int = 256
    waiting_served_ratio: float = 0.0
    batch_size: int = 0
    batch_wait: float = 0.05

    def __post_init__(self) -> None:
        if self.num_blocks < 1 or self.block_size < 1:
            raise ValueError(f"no KV blocks: {self.num_blocks} of {self.block_size} tokens")
        if not self.windows or any(w is not None and w < 1 for w in self.windows):
            raise ValueError(f"windows {self.windows} are not of one or more KV groups")
        if self.token_budget < 1 or self.max_sequences < 1:
            raise ValueError("token_budget and max_sequences must be at least 1")
        if not 0 < self.watermark <= 1:
            raise ValueError(f"watermark {self.watermark} is not in (0, 1]")
        if not 0 <= self.pinned_share <= 0.5:
            raise ValueError(f"pinned_share {self.pinned_share} is not in [0, 0.5]")
        if self.context_tokens < 2:
            raise ValueError("a context holds at least one prompt token and one answer token")
        if not 0 <= self.batch_size <= self.max_sequences:
            raise ValueError(f"batch_size {self.batch_size} is not in [0, max_sequences]")
        if min(self.drain_after, self.class_headstart) < 0:
            raise ValueError("drain_after and class_headstart must not be negative")

    @property
    def kv_tokens(self) -> int:
        """The longest sequence that the pool can hold alone beside pinned blocks, in tokens."""
        if self.windows == (None,):
            return self.request_blocks * self.block_size
        longest = max(self.context_tokens, self.request_blocks * self.block_size)
        return bisect_right(range(longest), self.request_blocks, key=self.most_blocks) - 1

    @property
    def pinned_blocks(self) -> int:
        """Most blocks kept for shared prefixes."""
        return int(self.num_blocks * self.pinned_share)

    @property
    def request_blocks(self) -> int:
        """Blocks that one sequence may hold: what is left when all pinned ones are kept, so that
        the last one that runs can always go on."""
        return self.num_blocks - self.pinned_blocks

    @property
    def watermark_blocks(self) -> int:
        """Blocks that admission may promise."""
        return max(1, int(self.num_blocks * self.watermark))

    def blocks(self, tokens: int, computed_at_once: int = 1) -> int:
        """Blocks that hold a sequence of `tokens` tokens while its last ones are computed."""
        return blocks_held(self.windows, self.block_size, tokens, computed_at_once)

    def most_blocks(self, tokens: int) -> int:
        """As `blocks`, at the moment when a sequence of `tokens` tokens holds the most."""
        return self.blocks(tokens, min(tokens, self.token_budget))


def reach(window: int, block_size: int) -> int:
    """Tokens before the next one that a group keeps. (A whole block at least: publishing a block
    takes the one before it.)"""
    return max(window - 1, block_size)


def blocks_held(
    windows: tuple[int | None, ...], block_size: int, tokens: int, computed_at_once: int = 1
) -> int:
    """Blocks, in all groups, of a sequence of `tokens` tokens while its last ones are computed."""
    entries, held = -(-tokens // block_size), 0
    for window in windows:
        if window is None:
            held += entries
        else:  # so many tokens in a row, wherever they begin in a block
            span = reach(window, block_size) + computed_at_once
            held += min(entries, (span + block_size - 2) // block_size + 1)
    return held
