"""One answer in the making: a prompt, the tokens chosen so far, and where their KV lives."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from worker.engine.token_counts import TokenCounts
from worker.protocol.types import (
    AdapterRef,
    FinishReason,
    RequestId,
    SamplingParams,
    TokenLogprob,
)

NOWHERE = -1
"""An entry of a block table whose keys and values nobody needs any more."""


class SequenceStatus(enum.Enum):
    """WAITING ⇄ RUNNING → FINISHED (preemption leads back to WAITING)."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """Choice `choice` of a request.

    Tokens are `prompt_ids` then `output_ids`. The first `num_computed` of them have their keys
    and values in `block_table` (token i lies in block `block_table[i // block_size]`). Entries
    of the table may be replaced between steps by blocks of equal content: read it anew each step.
    Models whose layers do not all see equally far keep a table per KV group: `block_table` is the
    first's, `more_tables` are the others', all equally long. Blocks beyond a window's reach are
    NOWHERE. `held_blocks` counts those that are somewhere, over all tables.
    `num_cached` prompt tokens were found in the prefix cache when it was first admitted.
    `priority` is smaller for more urgent classes; `arrival` orders within a class.
    A preempted sequence loses its blocks and keeps `output_ids`: they are replayed, never
    chosen again.

    `adapter_start` is the first token that the adapter changes (activated LoRA: where its
    invocation begins; otherwise 0), known once its adapter was ready. The first `shared_tokens`
    tokens are a prefix that all cache scopes share. `predicted_output` is the expected answer
    length that admission reserves memory for.

    The scheduler's own notes: `start_known` says that `adapter_start` was looked up,
    `promised_blocks` were reserved at admission, the first `num_published` blocks of the table
    are in the prefix cache, `block_keys` are chained hashes of the leading full blocks,
    `admissions` counts how often it was admitted. `token_counts` is the sampler's, for sequences
    with penalties.
    """

    request_id: RequestId
    choice: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival: int
    priority: int = 0
    adapter: AdapterRef | None = None
    cache_scope: str = ""
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    more_tables: tuple[list[int], ...] = ()
    held_blocks: int = 0
    num_computed: int = 0
    num_cached: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    adapter_start: int = 0
    start_known: bool = False
    shared_tokens: int = 0
    predicted_output: int = 128
    promised_blocks: int = 0
    num_published: int = 0
    block_keys: list[int] = field(default_factory=list)
    admissions: int = 0
    token_counts: TokenCounts | None = None

    @property
    def tables(self) -> tuple[list[int], ...]:
        """One per KV group."""
        return (self.block_table, *self.more_tables)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    def adapter_at(self, position: int) -> AdapterRef | None:
        """What the token at `position` is computed with."""
        return self.adapter if position >= self.adapter_start else None

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids at positions [start, stop)."""
        prompt = self.prompt_ids
        if stop <= len(prompt):
            return list(prompt[start:stop])
        if start >= len(prompt):
            return self.output_ids[start - len(prompt) : stop - len(prompt)]
        return [*prompt[start:], *self.output_ids[: stop - len(prompt)]]
