"""An engine over the shadow runner, checked after every step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.engine.shadow import ShadowResidency, ShadowRunner
from worker.engine.config import SchedulerConfig, reach
from worker.engine.engine import Engine
from worker.engine.outputs import EngineOutput, FinishedOutput
from worker.engine.sequence import NOWHERE, SequenceStatus
from worker.protocol.types import AdapterRef, RequestId, SamplingParams


class Letters:
    """Token i is one letter; no two tokens merge."""

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("A") + token) for token in ids)

    def token_to_id(self, token: str) -> int | None:
        return ord(token) - ord("A") if len(token) == 1 else None


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Harness:
    def __init__(
        self,
        *,
        eos: frozenset[int] = frozenset(),
        residency: ShadowResidency | None = None,
        **config: Any,
    ) -> None:
        config = {"num_blocks": 64, "block_size": 4, "context_tokens": 200, **config}
        self.config = SchedulerConfig(**config)
        self.runner = ShadowRunner(self.config.block_size, self.config.windows)
        self.residency = residency or ShadowResidency(self.config.adapter_rank)
        self.clock = Clock()
        self.engine = Engine(
            self.config, self.runner, self.residency, Letters(), eos, "revision", now=self.clock
        )
        self.outputs: list[EngineOutput] = []

    def add(self, name: str, prompt: Iterable[int], max_tokens: int = 4, **options: Any) -> None:
        sampling = options.pop("sampling", None) or SamplingParams(max_tokens=max_tokens)
        self.engine.add(RequestId(name), prompt, sampling, **options)

    def step(self) -> list[EngineOutput]:
        self._admissions = self.engine.counters.admissions
        self._preemptions = self.engine.counters.preemptions
        outputs = self.engine.step()
        self.residency.tick()
        self.outputs += outputs
        self.check()
        queue = self.engine.scheduler.admission.queue
        reasons = map(queue.reason, queue)
        assert not any(isinstance(r, int) for r in reasons), "a prefix is waited for one step"
        return outputs

    def check(self) -> None:
        scheduler = self.engine.scheduler
        scheduler.blocks.check_integrity(scheduler.running)
        self._check_windows()
        assert len(scheduler.running) <= self.config.max_sequences
        assert all(s.status is SequenceStatus.RUNNING for s in scheduler.running)
        waiting = list(scheduler.admission.queue)
        assert not set(waiting) & set(scheduler.running)
        promised = sum(sequence.promised_blocks for sequence in waiting)
        assert promised == scheduler.admission.promised_to_waiting
        pinned = {s.adapter.digest for s in scheduler.running if s.adapter}
        assert pinned <= set(self.residency.pins)
        if self.runner.batches:
            assert self.runner.batches[-1].num_tokens <= self.config.token_budget

    def _check_windows(self) -> None:
        """No table holds what its group's layers will never see again."""
        size = self.config.block_size
        for sequence in self.engine.scheduler.running:
            for window, table in zip(self.config.windows, sequence.tables, strict=True):
                if window is not None:
                    first = max(0, sequence.num_computed - reach(window, size)) // size
                    assert all(block == NOWHERE for block in table[:first])

    def run(self, most: int = 2000) -> dict[str, FinishedOutput]:
        """Step until nothing is left to do."""
        steps = 0
        while self.engine.has_work():
            steps += 1
            assert steps <= most, f"unfinished after {most} steps: {self.engine.stats()}"
            self.step()
        self.check_idle()
        return self.finished()

    def check_idle(self) -> None:
        """Nothing is held by anybody."""
        assert self.engine.scheduler.blocks.num_used == 0
        assert not self.residency.pins
        assert len(self.engine.scheduler.admission.queue) == 0
        assert self.engine.scheduler.admission.promised_to_waiting == 0

    def finished(self) -> dict[str, FinishedOutput]:
        return {o.request_id: o for o in self.outputs if isinstance(o, FinishedOutput)}

    def admitted_now(self) -> bool:
        """Whether the last step admitted somebody and preempted nobody."""
        counters = self.engine.counters
        admitted = counters.admissions > self._admissions
        return admitted and counters.preemptions == self._preemptions

    def of(self, kind: type[EngineOutput]) -> list[Any]:
        return [output for output in self.outputs if isinstance(output, kind)]

    def running(self) -> list[str]:
        return [sequence.request_id for sequence in self.engine.scheduler.running]

    def answers(self, name: str) -> list[list[int]]:
        return [list(choice.token_ids) for choice in self.finished()[name].choices]


def adapter(name: str, rank: int = 8) -> AdapterRef:
    return AdapterRef(name, rank)
