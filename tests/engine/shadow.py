"""A runner that keeps a model's KV as plain values and refuses any block that is not right.

Each slot holds what its keys and values would depend on: all tokens up to it, the adapter that
applied, and the scope it was written for. Reading a sequence's history through its block table
therefore finds every block that was lost, overwritten, shared too early or across a border. In a
KV group with a window only what the window reaches is read, as its layers do.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from worker.engine.batch import (
    AdapterLoadError,
    SampledToken,
    ScheduledBatch,
    ScheduledSequence,
)
from worker.engine.metrics import AdapterCounts
from worker.engine.sequence import Sequence
from worker.protocol.types import AdapterRef


@dataclass(frozen=True)
class Slot:
    history: int
    token: int
    adapter: str
    scope: str | None


class ShadowRunner:
    """`vocabulary` tokens; the next one is a function of the history alone."""

    def __init__(
        self, block_size: int, windows: tuple[int | None, ...] = (None,), vocabulary: int = 50
    ) -> None:
        self.block_size = block_size
        self.windows = windows
        self.vocabulary = vocabulary
        self.slots: dict[int, Slot] = {}
        self.poisoned: set[str] = set()
        self.computed = 0
        self.batches: list[ScheduledBatch] = []

    def execute(self, batch: ScheduledBatch) -> list[SampledToken]:
        assert batch.sequences, "an empty batch is not executed"
        self.batches.append(batch)
        histories = [self._read(scheduled) for scheduled in batch.sequences]
        written: set[int] = set()
        ends = [
            self._write(scheduled, history, written)
            for scheduled, history in zip(batch.sequences, histories, strict=True)
        ]
        return [
            self._sample(scheduled.sequence, history)
            for scheduled, history in zip(batch.sequences, ends, strict=True)
            if scheduled.samples
        ]

    def expected(
        self, prompt: tuple[int, ...], adapter: str, choice: int, count: int, start: int = 0
    ) -> list[int]:
        """The answer of a sequence that has the engine for itself.

        `start`: the adapter applies from this position on.
        """
        history, tokens = 0, list(prompt)
        while len(tokens) < len(prompt) + count:
            done = len(tokens) if len(tokens) > len(prompt) else 0
            for position in range(max(0, done - 1), len(tokens)):
                applied = adapter if position >= start else ""
                history = _next_history(history, tokens[position], applied)
            tokens.append(self._choose(history, choice))
        return tokens[len(prompt) :]

    def _addresses(self, sequence: Sequence, position: int) -> list[int]:
        """Where each group keeps it."""
        assert len(sequence.tables) == len(self.windows)
        blocks = [table[position // self.block_size] for table in sequence.tables]
        return [block * self.block_size + position % self.block_size for block in blocks]

    def _read(self, scheduled: ScheduledSequence) -> int:
        sequence, history = scheduled.sequence, 0
        assert scheduled.start == sequence.num_computed
        assert 0 < scheduled.num_tokens <= sequence.num_tokens - scheduled.start
        for position, token in enumerate(sequence.tokens(0, scheduled.start)):
            expected = self._slot(sequence, position, token, history)
            addresses = self._addresses(sequence, position)
            for window, address in zip(self.windows, addresses, strict=True):
                if window is None or position > scheduled.start - window:
                    found = self.slots.get(address)
                    where = f"{sequence.request_id}@{position}, window {window}"
                    assert found == expected, f"{where}: {found} != {expected}"
            history = expected.history
        return history

    def _write(self, scheduled: ScheduledSequence, history: int, written: set[int]) -> int:
        sequence = scheduled.sequence
        tokens = sequence.tokens(scheduled.start, scheduled.stop)
        for position, token in enumerate(tokens, scheduled.start):
            slot = self._slot(sequence, position, token, history)
            for address in self._addresses(sequence, position):
                assert address >= 0, "a block that is given up is written"
                assert address not in written, f"two sequences write slot {address}"
                written.add(address)
                self.slots[address] = slot
            history = slot.history
        self.computed += len(tokens)
        return history

    def _slot(self, sequence: Sequence, position: int, token: int, history: int) -> Slot:
        adapter = sequence.adapter.digest if sequence.adapter else ""
        if position < sequence.adapter_start:
            adapter = ""
        # The scope is checked per block: one that reaches beyond the shared prefix is not shared.
        stop = (position // self.block_size + 1) * self.block_size
        scope = None if stop <= sequence.shared_tokens else sequence.cache_scope
        return Slot(_next_history(history, token, adapter), token, adapter, scope)

    def _sample(self, sequence: Sequence, history: int) -> SampledToken:
        if sequence.request_id in self.poisoned:
            return SampledToken(0, error="logits are not finite")
        return SampledToken(self._choose(history, sequence.choice))

    def _choose(self, history: int, choice: int) -> int:
        return hash((history, choice, "sample")) % self.vocabulary


class ShadowResidency:
    """A rank pool that takes `delay` ticks to load an adapter, and fails for `broken` ones."""

    def __init__(self, rank: int, delay: int = 0, broken: dict[str, str] | None = None) -> None:
        self.rank = rank
        self.delay = delay
        self.broken = broken or {}
        self.large: set[str] = set()  # loaded only while no adapter is pinned
        self.away: set[str] = set()  # not given by the store
        self.starts: dict[str, int] = {}
        self.pins: dict[str, int] = {}
        self.loaded: OrderedDict[str, int] = OrderedDict()
        self.loading: dict[str, list[int]] = {}

    def prefetch(self, adapter: AdapterRef) -> None:
        return None

    def prepare(self, adapter: AdapterRef) -> bool:
        digest = adapter.digest
        if digest in self.broken:
            raise AdapterLoadError(self.broken[digest], f"adapter {digest} is broken")
        if digest in self.loaded:
            self.loaded.move_to_end(digest)
            return True
        if self.is_away(adapter) or self.lacks_memory(adapter):
            return False
        if digest not in self.loading and self._make_room(adapter.rank):
            self.loading[digest] = [self.delay, adapter.rank]
            self._finish_loads()
        return digest in self.loaded

    def tick(self) -> None:
        for load in self.loading.values():
            load[0] -= 1
        self._finish_loads()

    def _finish_loads(self) -> None:
        for digest in [digest for digest, load in self.loading.items() if load[0] <= 0]:
            self.loaded[digest] = self.loading.pop(digest)[1]
        assert sum(self.loaded.values()) <= self.rank

    def first_token(self, adapter: AdapterRef, prompt_ids: tuple[int, ...]) -> int:
        return self.starts.get(adapter.digest, 0)

    def counts(self) -> AdapterCounts:
        return AdapterCounts(loads=len(self.loaded))

    def pin(self, adapter: AdapterRef) -> None:
        assert adapter.digest in self.loaded, f"{adapter.digest} is pinned before it is ready"
        self.pins[adapter.digest] = self.pins.get(adapter.digest, 0) + 1

    def unpin(self, adapter: AdapterRef) -> None:
        self.pins[adapter.digest] -= 1
        if not self.pins[adapter.digest]:
            del self.pins[adapter.digest]

    def free_rank(self) -> int:
        return self.rank - sum(self.loaded[digest] for digest in self.pins)

    def is_away(self, adapter: AdapterRef) -> bool:
        return adapter.digest in self.away

    def lacks_memory(self, adapter: AdapterRef) -> bool:
        return adapter.digest in self.large and bool(self.pins)

    def resident(self) -> tuple[str, ...]:
        return tuple(self.loaded)

    def _make_room(self, rank: int) -> bool:
        taken = sum(self.loaded.values()) + sum(rank for _, rank in self.loading.values())
        for digest in [digest for digest in self.loaded if digest not in self.pins]:
            if self.rank - taken >= rank:
                break
            taken -= self.loaded.pop(digest)
        return self.rank - taken >= rank


def _next_history(history: int, token: int, adapter: str) -> int:
    return hash((history, token, adapter))
