"""Execute scheduled batches: pack, run the model, choose tokens."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from kernels.lora import LoraSegments
from kernels.paged_attention import AttentionPlan
from worker.engine.attention import ForwardContext
from worker.engine.batch import SampledToken, ScheduledBatch, ScheduledSequence
from worker.engine.kv_cache import KvCache
from worker.engine.model_loader import ServedModel
from worker.engine.sampler import sample_tokens
from worker.engine.sequence import NOWHERE
from worker.protocol.types import AdapterRef


class AdapterRows(Protocol):
    """Where resident adapters lie in the rank pool."""

    def rows(self, adapter: AdapterRef) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Pack:
    """A batch laid end to end, sequences of one adapter side by side, base first. (Base tokens
    before an activated adapter's invocation stay in their sequence.)"""

    scheduled: tuple[ScheduledSequence, ...]
    token_ids: Tensor  # int64 [tokens]
    positions: Tensor  # int64 [tokens]
    rows: Tensor  # int64 [sampling sequences]: their last tokens


class ModelRunner:
    """Owns the KV cache of one model (implements `worker.engine.batch.Runner`)."""

    def __init__(
        self,
        model: ServedModel,
        num_blocks: int,
        block_size: int = 16,
        adapters: AdapterRows | None = None,
    ) -> None:
        self.model = model
        self.cache = KvCache(model.kv_layout, num_blocks, block_size, model.device)
        self._adapters = adapters

    def execute(self, batch: ScheduledBatch) -> list[SampledToken]:
        """One answer per sequence that samples, in the batch's order."""
        self.cache.copy(batch.block_copies)
        if not batch.sequences:
            return []
        pack, logits = self._forward(batch)
        sampling = [scheduled.sequence for scheduled in pack.scheduled if scheduled.samples]
        tokens = sample_tokens(logits, sampling) if sampling else []
        answers = {id(seq): token for seq, token in zip(sampling, tokens, strict=True)}
        return [answers[id(item.sequence)] for item in batch.sequences if item.samples]

    def logits(self, batch: ScheduledBatch) -> Tensor:
        """float32 [sampling sequences, vocabulary], in the batch's order; chooses nothing."""
        pack, logits = self._forward(batch)
        packed = [id(item.sequence) for item in pack.scheduled if item.samples]
        order = [packed.index(id(item.sequence)) for item in batch.sequences if item.samples]
        return logits[order]

    def _forward(self, batch: ScheduledBatch) -> tuple[_Pack, Tensor]:
        pack = _pack(batch, self.model.device)
        lora = self._segments([run for item in pack.scheduled for run in _runs(item)])
        head = lora
        if lora is not None and self.model.packed.selects_rows:
            sampling = [item for item in pack.scheduled if item.samples]
            head = self._segments(
                [(item.sequence.adapter_at(item.stop - 1), 1) for item in sampling]
            )
        context = ForwardContext(self._plans(pack), self.cache, lora, head)
        return pack, self.model.packed.forward(pack.token_ids, pack.positions, pack.rows, context)

    def _plans(self, pack: _Pack) -> tuple[AttentionPlan, ...]:
        """One for each KV group."""
        tables = zip(*(item.sequence.tables for item in pack.scheduled), strict=True)
        return tuple(
            AttentionPlan.build(
                [item.num_tokens for item in pack.scheduled],
                [item.stop for item in pack.scheduled],
                [_readable(table) for table in of_group],
                self.cache.block_size,
                self.model.device,
            )
            for of_group in tables
        )

    def _segments(self, parts: list[tuple[AdapterRef | None, int]]) -> LoraSegments | None:
        """Of packed rows: adapters with the number of rows that each changes."""
        adapters: dict[AdapterRef, int] = {}
        runs = [
            (-1 if ref is None else adapters.setdefault(ref, len(adapters)), count)
            for ref, count in parts
        ]
        if not adapters:
            return None
        if self._adapters is None:
            raise RuntimeError("an adapter was scheduled on a runner without a rank pool")
        return LoraSegments.build(runs, [self._adapters.rows(ref) for ref in adapters])


def _readable(table: list[int]) -> list[int]:
    """Blocks that are given up begin a table: never looked at, but they must have an address."""
    if not table or table[0] != NOWHERE:
        return table
    return [max(block, 0) for block in table]


def _runs(item: ScheduledSequence) -> list[tuple[AdapterRef | None, int]]:
    """Tokens before an activated adapter's invocation are the base model's."""
    base = min(max(item.sequence.adapter_start - item.start, 0), item.num_tokens)
    runs = [(None, base), (item.sequence.adapter, item.num_tokens - base)]
    return [(adapter, count) for adapter, count in runs if count]


def _pack(batch: ScheduledBatch, device: torch.device) -> _Pack:
    def adapter(item: ScheduledSequence) -> str:
        ref = item.sequence.adapter_at(item.stop - 1)
        return ref.digest if ref else ""

    scheduled = tuple(sorted(batch.sequences, key=adapter))
    ids = [token for item in scheduled for token in item.sequence.tokens(item.start, item.stop)]
    positions = [position for item in scheduled for position in range(item.start, item.stop)]
    ends = accumulate(item.num_tokens for item in scheduled)
    rows = [end - 1 for item, end in zip(scheduled, ends, strict=True) if item.samples]
    return _Pack(
        scheduled=scheduled,
        token_ids=torch.tensor(ids, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        rows=torch.tensor(rows, dtype=torch.int64, device=device),
    )
