"""A whole engine over a small real model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.engine.peft_adapters import cache, wait_for_loads
from worker.engine.config import SchedulerConfig
from worker.engine.detokenizer import TextDecoder
from worker.engine.engine import Engine
from worker.engine.fixed_rows import fix_rows
from worker.engine.model_loader import DTypeName, load_model
from worker.engine.model_runner import ModelRunner
from worker.engine.null_runner import NullResidency
from worker.engine.outputs import DeltaOutput, EngineOutput, FailedOutput, FinishedOutput
from worker.engine.packed_linear import pack, packable
from worker.protocol.types import AdapterRef, RequestId, SamplingParams


class Letters:
    """Token i is one letter; no two tokens merge."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(0x100 + token) for token in ids)

    def token_to_id(self, token: str) -> int | None:
        return None


class RealEngine:
    """`outputs` holds all that was said so far."""

    def __init__(
        self,
        folder: Path,
        tokenizer: TextDecoder | None = None,
        *,
        eos: frozenset[int] | None = frozenset(),
        adapters: Mapping[AdapterRef, Path] | None = None,
        longest: int | None = None,
        dtype: DTypeName = "float32",
        deterministic: bool = False,
        **config: Any,
    ) -> None:
        """`eos` None takes the model's own; `adapters` are folders. The pool holds one sequence of
        `longest` tokens, and little more."""
        model = load_model(folder, dtype, certified=True)
        if deterministic:  # with packed weights where the processor has them, as a worker
            pack(packable(model.packed.module))
            fix_rows(model.packed.module)
        sizes = {
            "num_blocks": 256,
            "block_size": 4,
            "token_budget": 32,
            "context_tokens": model.context_tokens,
            "windows": model.kv_layout.windows,
            **config,
        }
        self.config = SchedulerConfig(**sizes)
        if longest is not None:
            blocks = self.config.most_blocks(longest) + 2
            self.config = replace(self.config, num_blocks=blocks)
        rank = self.config.adapter_rank
        self._adapters = cache(model, adapters, rank) if adapters else None
        residency = self._adapters or NullResidency(rank)
        runner = ModelRunner(model, self.config.num_blocks, self.config.block_size, self._adapters)
        self.engine = Engine(
            self.config,
            runner,
            residency,
            tokenizer or Letters(),
            model.eos_ids if eos is None else eos,
            model.revision,
        )
        self.outputs: list[EngineOutput] = []

    def add(
        self, name: str, prompt: Sequence[int], sampling: SamplingParams, **options: Any
    ) -> None:
        """Too little memory is reserved for its answer, so that small pools preempt."""
        self.engine.add(RequestId(name), prompt, sampling, predicted_output=1, **options)

    def run(self) -> dict[str, FinishedOutput]:
        scheduler = self.engine.scheduler
        while self.engine.has_work():
            self.outputs += self.engine.step()
            if self._adapters is not None:
                wait_for_loads(self._adapters)
            scheduler.blocks.check_integrity(scheduler.running)
        assert scheduler.blocks.num_used == 0
        return {each.request_id: each for each in self.outputs if isinstance(each, FinishedOutput)}

    def answers(
        self, requests: Mapping[str, tuple[Sequence[int], SamplingParams]]
    ) -> dict[str, list[list[int]]]:
        """Token ids of every choice, all requests added before the first step."""
        for name, (prompt, sampling) in requests.items():
            self.add(name, prompt, sampling)
        finished = self.run()
        return {
            name: [list(choice.token_ids) for choice in finished[name].choices] for name in requests
        }

    def failures(self) -> dict[str, FailedOutput]:
        return {each.request_id: each for each in self.outputs if isinstance(each, FailedOutput)}

    def streamed(self, name: str, choice: int = 0) -> str:
        return "".join(
            each.text
            for each in self.outputs
            if isinstance(each, DeltaOutput) and (each.request_id, each.choice) == (name, choice)
        )
