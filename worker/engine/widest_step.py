"""The step that takes the most memory, to be run once at start: see what it needs, keep that free.

As many sequences as may run, all of them sampling with every option, and the rest of the token
budget as a chunk that ends a long context. Half of the tokens go through the whole rank pool.
"""

from __future__ import annotations

from dataclasses import dataclass

from worker.engine.batch import ScheduledBatch, ScheduledSequence
from worker.engine.model_loader import ServedModel
from worker.engine.model_runner import ModelRunner
from worker.engine.sequence import Sequence
from worker.protocol.types import AdapterRef, RequestId, SamplingParams

SAMPLING = SamplingParams(
    max_tokens=2, temperature=1.0, top_p=0.9, presence_penalty=0.1, logprobs=20
)


CPU_CONTEXT = 1024
"""Where the chunk ends on a CPU: a longer context takes time there, and little more memory."""


@dataclass(frozen=True, slots=True)
class WidestStep:
    """`token_budget` tokens at most, of `max_sequences` sequences at most."""

    token_budget: int
    max_sequences: int
    context_tokens: int
    adapter_rank: int

    @classmethod
    def on(
        cls,
        device_type: str,
        *,
        token_budget: int,
        max_sequences: int,
        context_tokens: int,
        adapter_rank: int,
    ) -> WidestStep:
        context = min(context_tokens, CPU_CONTEXT) if device_type == "cpu" else context_tokens
        return cls(token_budget, max_sequences, context, adapter_rank)

    @property
    def sequences(self) -> int:
        return min(self.max_sequences, self.token_budget)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(tokens before, tokens computed) of each sequence; the chunk comes first."""
        others = self.sequences - 1
        chunk = min(self.token_budget - others, self.context_tokens)
        return [(self.context_tokens - chunk, chunk), *[(0, 1)] * others]

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.spans)


class WholePool:
    """One adapter that takes every row of the rank pool (`AdapterRows`)."""

    def __init__(self, rank: int) -> None:
        self.ref = AdapterRef("widest", rank)

    def rows(self, adapter: AdapterRef) -> tuple[int, ...]:
        return tuple(range(adapter.rank))


def run_widest_step(model: ServedModel, step: WidestStep, block_size: int) -> None:
    """On a cache of one block, which every block table names over and over: what comes out is
    noise, but it costs the same."""
    pool = WholePool(step.adapter_rank)
    runner = ModelRunner(model, 1, block_size, pool)
    groups = len(model.kv_layout.groups)
    scheduled = []
    for number, (start, count) in enumerate(step.spans):
        sequence = Sequence(
            request_id=RequestId(str(number)),
            choice=0,
            prompt_ids=(0,) * (start + count),
            sampling=SAMPLING,
            arrival=number,
            adapter=pool.ref if step.adapter_rank and number % 2 == 0 else None,
            adapter_start=start + count // 2 if count > 1 else 0,
            block_table=[0] * -(-(start + count) // block_size),
            num_computed=start,
        )
        sequence.more_tables = tuple(list(sequence.block_table) for _ in range(groups - 1))
        scheduled.append(ScheduledSequence(sequence, start, count))
    runner.execute(ScheduledBatch(tuple(scheduled)))
