"""Who may start: order, batching mode, adapters, shared prefixes and memory, in that sequence."""

from __future__ import annotations

from collections.abc import Callable

from worker.engine.adapter_gate import AdapterGate
from worker.engine.batch import AdapterLoadError, AdapterResidency
from worker.engine.batch_formation import batch_formation
from worker.engine.block_manager import BlockManager
from worker.engine.config import SchedulerConfig
from worker.engine.pending_prefixes import PendingPrefixes
from worker.engine.prefix_cache import Prefix
from worker.engine.sequence import Sequence, SequenceStatus
from worker.engine.waiting_queue import WaitingQueue

TRIED = 64
"""Most waiting sequences looked at in one step."""


class Admission:
    """Everything that waits, and the rule by which it starts.

    A sequence is admitted when the blocks it is expected to need (prompt that is not in use
    already, and predicted answer) fit under the watermark beside what running ones hold and were
    promised. With nobody running it is admitted in any case. The first in line that lacks memory
    stops those behind it, so that small ones cannot keep a large one waiting.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        adapters: AdapterResidency,
        now: Callable[[], float],
    ) -> None:
        self.config = config
        self.gate = AdapterGate(adapters, config.adapter_rank, config.drain_after)
        self.queue = WaitingQueue(config.class_headstart)
        self.promised_to_waiting = 0
        self._blocks = blocks
        self._adapters = adapters
        self._formation = batch_formation(config, now)
        self._pending = PendingPrefixes()
        self._failed: list[tuple[Sequence, AdapterLoadError]] = []
        self._step = 0
        self._tries = 0

    def add(self, sequence: Sequence) -> None:
        sequence.promised_blocks = self.config.blocks(self._expected_tokens(sequence))
        self.promised_to_waiting += sequence.promised_blocks
        self.queue.add(sequence)

    def add_preempted(self, sequence: Sequence) -> None:
        self._formation.left()
        self.add(sequence)

    def withdraw(self, sequence: Sequence) -> None:
        """It waits no more."""
        self.queue.remove(sequence)
        self.promised_to_waiting -= sequence.promised_blocks
        adapter = sequence.adapter
        if adapter is not None and not self.queue.wants(adapter):
            self.gate.forget(adapter)

    def take_failed(self) -> list[tuple[Sequence, AdapterLoadError]]:
        """Sequences whose adapter cannot be loaded, told once. They wait no more."""
        failed, self._failed = self._failed, []
        return failed

    def rank_wanted(self) -> int:
        """Rank rows that waiting sequences need beyond what is pinned."""
        wanted = self.queue.adapters()
        return sum(a.rank for a in wanted if not self.gate.is_pinned(a.digest))

    def begin_step(self, step: int, running: int) -> None:
        """Once a step: whoever waited for an adapter that is ready now gets in line."""
        self._step, self._tries = step, 0
        ready, failed = self.gate.poll(step)
        for adapter in ready:
            self.queue.unpark(adapter)
        for adapter, error in failed:
            for sequence in self.queue.parked(adapter):
                self._fail(sequence, error)
        self._formation.begin_step(running, len(self.queue))
        self._load_ahead()

    def next(self, outstanding: int, alone: bool) -> Sequence | None:
        """The next sequence that starts now, its cached prefix attached and its adapter pinned.

        `outstanding`: blocks promised to running sequences and not yet held by them. `alone`:
        nobody runs.
        """
        while self._tries < TRIED and self._formation.is_open():
            self._tries += 1
            sequence = self.queue.head()
            if sequence is None:
                return None
            if not self._adapter_ready(sequence):
                continue
            cached = self._blocks.match(sequence)
            if self._waits_for_prefix(sequence, len(cached)):
                continue
            if not alone and not self._fits(sequence, cached, outstanding):
                return None
            self._start(sequence, cached)
            return sequence
        return None

    def computed(self, sequence: Sequence, blocks: int) -> None:
        """Its first `blocks` blocks can be shared now."""
        for key in self._pending.settle(sequence, blocks):
            self.queue.unpark(key)

    def stopped(self, sequence: Sequence) -> None:
        """A running sequence was finished, preempted, failed or cancelled."""
        for key in self._pending.abandon(sequence):
            self.queue.unpark(key)
        if sequence.adapter is not None:
            self.gate.unpin(sequence.adapter)

    def _load_ahead(self) -> None:
        """Begin to load for the next in line, though there may be no place for it yet."""
        sequence = self.queue.head()
        while sequence is not None and not self._adapter_ready(sequence) and self._tries < TRIED:
            self._tries += 1
            sequence = self.queue.head()

    def _adapter_ready(self, sequence: Sequence) -> bool:
        adapter = sequence.adapter
        if adapter is None:
            return True
        try:
            if not self.gate.admits(adapter, self._step):
                self.queue.park(sequence, adapter)
                return False
        except AdapterLoadError as error:
            self._fail(sequence, error)
            return False
        if not sequence.start_known:
            sequence.adapter_start = self._adapters.first_token(adapter, sequence.prompt_ids)
            sequence.start_known = True
        return True

    def _waits_for_prefix(self, sequence: Sequence, cached: int) -> bool:
        """Park it when its next block is computed in this step anyway.

        It waits for one step only: budget is left for a waiting sequence only where every owner
        of pending blocks gets to the end of its prompt.
        """
        if not len(self._pending):
            return False
        most = (sequence.num_tokens - 1) // self.config.block_size
        keys = self._blocks.cache.keys(sequence, most)[cached:most]
        key = self._pending.last_pending(keys)
        if key is None:
            return False
        self.queue.park(sequence, key)
        return True

    def _fits(self, sequence: Sequence, cached: list[Prefix], outstanding: int) -> bool:
        shared = self._blocks.in_use(cached, self._expected_tokens(sequence))
        needed = self._blocks.num_used + outstanding + sequence.promised_blocks - shared
        return needed <= self.config.watermark_blocks

    def _start(self, sequence: Sequence, cached: list[Prefix]) -> None:
        if sequence.adapter is not None:
            self.gate.pin(sequence.adapter)
        self.withdraw(sequence)
        self._formation.joined()
        self._blocks.attach(sequence, cached)
        if not sequence.admissions:
            sequence.num_cached = sequence.num_computed
        sequence.admissions += 1
        sequence.status = SequenceStatus.RUNNING
        if self.config.prefix_caching:
            full = len(sequence.prompt_ids) // self.config.block_size
            self._blocks.cache.keys(sequence, full)
            self._pending.claim(sequence, len(cached), full)

    def _fail(self, sequence: Sequence, error: AdapterLoadError) -> None:
        self.withdraw(sequence)
        self._failed.append((sequence, error))

    def _expected_tokens(self, sequence: Sequence) -> int:
        """Tokens of the prompt and the predicted answer; one that outgrew its prediction is
        expected to double. The last token of an answer needs no KV."""
        produced = len(sequence.output_ids)
        answer = max(sequence.predicted_output, 2 * produced)
        total = len(sequence.prompt_ids) + min(answer, sequence.sampling.max_tokens)
        total = min(total, self.config.context_tokens) - 1
        return max(total, sequence.num_tokens)
