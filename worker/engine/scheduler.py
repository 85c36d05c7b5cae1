"""What the next step computes: token-level scheduling over paged memory and adapters.

Each step has a budget of tokens. Sequences that decode take one each, those still reading their
prompt take a chunk, and waiting ones are admitted while budget, places, memory and adapters last.
The decision is data (`ScheduledBatch`); nothing is executed here.

Progress. Without blocks the newest sequence of the lowest class is preempted; the oldest of the
highest class is therefore never preempted while another runs, alone it has the whole pool, and
what cannot fit the whole pool is refused before it gets here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from worker.engine.admission import Admission
from worker.engine.batch import (
    AdapterLoadError,
    AdapterResidency,
    ScheduledBatch,
    ScheduledSequence,
)
from worker.engine.block_manager import BlockManager
from worker.engine.config import SchedulerConfig
from worker.engine.metrics import EngineCounters
from worker.engine.prefix_cache import PrefixCache
from worker.engine.sequence import Sequence, SequenceStatus

DECODES_DELAYED = 8
"""Most steps in a row in which `prefill_first` leaves a decode out."""


@dataclass(slots=True)
class StepPlan:
    """A step in the making: tokens still to give, and who got how many."""

    budget: int
    chosen: dict[Sequence, int] = field(default_factory=dict)

    def give(self, sequence: Sequence, tokens: int) -> None:
        self.chosen[sequence] = tokens
        self.budget -= tokens

    def take_back(self, sequence: Sequence) -> None:
        self.budget += self.chosen.pop(sequence, 0)


class Scheduler:
    """Owns every sequence from `add` until `remove`."""

    def __init__(
        self,
        config: SchedulerConfig,
        adapters: AdapterResidency,
        model_revision: str,
        *,
        counters: EngineCounters | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.counters = counters or EngineCounters()
        cache = PrefixCache(
            model_revision,
            config.block_size,
            groups=len(config.windows),
            enabled=config.prefix_caching,
        )
        self.blocks = BlockManager(config.num_blocks, config.block_size, cache, config.windows)
        self.admission = Admission(config, self.blocks, adapters, now)
        self.running: dict[Sequence, None] = {}
        self._decodes_delayed = 0
        self._step = 0

    def add(self, sequence: Sequence) -> None:
        self.admission.add(sequence)

    def remove(self, sequence: Sequence, *, trusted: bool = True) -> None:
        """Finished, failed or cancelled: forget it wherever it is.

        Not `trusted`: what it computed must not be found by others.
        """
        if sequence in self.running:
            self._stop(sequence, trusted=trusted)
        elif sequence in self.admission.queue:
            self.admission.withdraw(sequence)
        sequence.status = SequenceStatus.FINISHED

    def take_failed(self) -> list[tuple[Sequence, AdapterLoadError]]:
        """Sequences whose adapter cannot be loaded, told once. They wait no more."""
        return self.admission.take_failed()

    def outstanding(self) -> int:
        """Blocks promised to running sequences that they do not hold yet."""
        return sum(max(0, s.promised_blocks - s.held_blocks) for s in self.running)

    def schedule(self) -> ScheduledBatch:
        """Decide the next step. An empty batch: nobody can run now."""
        self._step += 1
        self.admission.begin_step(self._step, len(self.running))
        plan = StepPlan(self.config.token_budget)
        prefilling, decoding = self._split()
        if self._prefill_goes_first(len(prefilling), len(decoding)):
            self._prefill(prefilling, plan)
            self._admit(plan)
            self._decode(decoding, plan)
        else:
            self._decode(decoding, plan)
            self._prefill(prefilling, plan)
            self._admit(plan)
        self._note_delay(decoding, plan)
        chosen = [ScheduledSequence(s, s.num_computed, n) for s, n in plan.chosen.items()]
        return ScheduledBatch(tuple(chosen))

    def complete(self, batch: ScheduledBatch) -> None:
        """The batch was executed: its tokens are computed and full blocks can be shared."""
        size = self.config.block_size
        for scheduled in batch.sequences:
            sequence = scheduled.sequence
            sequence.num_computed = computed = scheduled.start + scheduled.num_tokens
            self._count(scheduled)
            if computed // size > sequence.num_published:
                self.blocks.publish(sequence)
                self.admission.computed(sequence, computed // size)
            if self.blocks.windowed:
                self.blocks.prune(sequence)

    def _split(self) -> tuple[list[Sequence], list[Sequence]]:
        prefilling: list[Sequence] = []
        decoding: list[Sequence] = []
        for sequence in self.running:
            one_left = sequence.num_tokens - sequence.num_computed == 1
            (decoding if one_left and sequence.output_ids else prefilling).append(sequence)
        return prefilling, decoding

    def _prefill_goes_first(self, prefilling: int, decoding: int) -> bool:
        if self.config.policy == "decode_first" or self._decodes_delayed >= DECODES_DELAYED:
            return False
        return prefilling + len(self.admission.queue) >= self.config.waiting_served_ratio * decoding

    def _note_delay(self, decoding: list[Sequence], plan: StepPlan) -> None:
        left_out = plan.budget < 1 and any(
            s not in plan.chosen for s in decoding if s in self.running
        )
        self._decodes_delayed = self._decodes_delayed + 1 if left_out else 0

    def _decode(self, decoding: list[Sequence], plan: StepPlan) -> None:
        if len(decoding) > plan.budget:
            turn = self._step % len(decoding)
            decoding = decoding[turn:] + decoding[:turn]
        size = self.config.block_size
        for sequence in decoding:
            if plan.budget < 1:
                return
            if sequence.num_computed < len(sequence.block_table) * size:
                plan.give(sequence, 1)
            else:
                self._give(sequence, 1, plan)

    def _prefill(self, prefilling: list[Sequence], plan: StepPlan) -> None:
        for sequence in prefilling:
            if plan.budget < 1:
                return
            self._give(sequence, sequence.num_tokens - sequence.num_computed, plan)

    def _give(self, sequence: Sequence, wanted: int, plan: StepPlan) -> None:
        """Up to `wanted` tokens, preempting for their blocks; nothing if it is preempted itself."""
        if sequence not in self.running:
            return
        tokens = min(wanted, plan.budget)
        while not self.blocks.grow(sequence, sequence.num_computed + tokens):
            victim = max(self.running, key=lambda s: (s.priority, s.arrival, s.choice))
            plan.take_back(victim)
            self._preempt(victim)
            if victim is sequence:
                return
        plan.give(sequence, tokens)

    def _admit(self, plan: StepPlan) -> None:
        if plan.budget < 1 or len(self.running) >= self.config.max_sequences:
            return
        outstanding = self.outstanding() if len(self.admission.queue) else 0
        while plan.budget > 0 and len(self.running) < self.config.max_sequences:
            sequence = self.admission.next(outstanding, alone=not self.running)
            if sequence is None:
                return
            outstanding += max(0, sequence.promised_blocks - sequence.held_blocks)
            self.running[sequence] = None
            self.counters.admissions += 1
            self.counters.cached_tokens += sequence.num_computed
            held = sequence.held_blocks
            self._give(sequence, sequence.num_tokens - sequence.num_computed, plan)
            outstanding -= sequence.held_blocks - held

    def _preempt(self, sequence: Sequence) -> None:
        self.counters.preemptions += 1
        self.counters.discarded_tokens += sequence.num_computed
        self._stop(sequence)
        self.admission.add_preempted(sequence)

    def _stop(self, sequence: Sequence, *, trusted: bool = True) -> None:
        del self.running[sequence]
        sequence.status = SequenceStatus.WAITING
        self.blocks.release(sequence, trusted=trusted)
        self.admission.stopped(sequence)

    def _count(self, scheduled: ScheduledSequence) -> None:
        if scheduled.num_tokens == 1 and scheduled.start >= len(scheduled.sequence.prompt_ids):
            self.counters.decode_tokens += 1
        else:
            self.counters.prefill_tokens += scheduled.num_tokens
