"""Tiny models of real architectures, and a driver that fills batches by hand."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence as Rows
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from tests.engine.architectures import defaults
from worker.engine.batch import SampledToken, ScheduledBatch, ScheduledSequence
from worker.engine.model_runner import ModelRunner
from worker.engine.sequence import Sequence
from worker.protocol.types import AdapterRef, RequestId, SamplingParams

logging.set_verbosity_error()
logging.disable_progress_bar()
torch.set_num_threads(1)  # models this small only lose time to a second thread

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_config(model_type: str, **changes: object) -> AutoConfig:
    """A change to None leaves a size out."""
    fields = {**SIZES, **defaults(model_type), **changes}
    return AutoConfig.for_model(
        model_type, **{name: value for name, value in fields.items() if value is not None}
    )


def save_tiny_model(folder: Path, model_type: str = "llama", **changes: object) -> Path:
    """A folder with a small random model, as save_pretrained writes it."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        tiny_config(model_type, **changes), dtype=torch.float32
    )
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, 0, 0.15)
    model.tie_weights()
    model.save_pretrained(folder)
    return folder


def hf_model(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.inference_mode()
def hf_greedy(model: torch.nn.Module, prompt: Rows[int], tokens: int) -> list[int]:
    """Greedy answer of `tokens` tokens, end-of-text included like any other token."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def prompts(count: int, vocabulary: int = 96, longest: int = 40, seed: int = 5) -> list[list[int]]:
    rng = random.Random(seed)
    return [
        [rng.randrange(3, vocabulary) for _ in range(rng.randrange(1, longest + 1))]
        for _ in range(count)
    ]


def sequence(
    prompt: Rows[int],
    adapter: AdapterRef | None = None,
    *,
    choice: int = 0,
    sampling: SamplingParams | None = None,
) -> Sequence:
    return Sequence(
        request_id=RequestId("r"),
        choice=choice,
        prompt_ids=tuple(prompt),
        sampling=sampling or SamplingParams(max_tokens=64, temperature=0),
        arrival=0,
        adapter=adapter,
    )


class Driver:
    """Schedules random chunks of random sequences, blocks scattered, until all have `tokens`."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner = runner
        self._random = random.Random(seed)
        self._free = list(range(runner.cache.num_blocks))
        self._random.shuffle(self._free)

    def schedule(self, sequence: Sequence, num_tokens: int) -> ScheduledSequence:
        """The next `num_tokens` of a sequence, with blocks for them."""
        start = sequence.num_computed
        size = self.runner.cache.block_size
        if not sequence.more_tables:
            others = len(self.runner.cache.layout.groups) - 1
            sequence.more_tables = tuple([] for _ in range(others))
        while len(sequence.block_table) * size < start + num_tokens:
            for table in sequence.tables:
                table.append(self._free.pop())
        return ScheduledSequence(sequence, start, num_tokens)

    def step(self, scheduled: Rows[ScheduledSequence]) -> list[SampledToken]:
        tokens = self.runner.execute(ScheduledBatch(tuple(scheduled)))
        sampled = iter(tokens)
        for item in scheduled:
            samples = item.samples
            item.sequence.num_computed = item.stop
            if samples:
                token = next(sampled)
                assert token.error is None
                item.sequence.output_ids.append(token.token_id)
        return tokens

    def run(self, sequences: Rows[Sequence], tokens: int, longest_chunk: int = 9) -> None:
        while busy := [seq for seq in sequences if len(seq.output_ids) < tokens]:
            chosen = [seq for seq in busy if self._random.random() < 0.7] or busy
            self._random.shuffle(chosen)
            self.step(
                [
                    self.schedule(
                        seq,
                        min(
                            seq.num_tokens - seq.num_computed,
                            self._random.randint(1, longest_chunk),
                        ),
                    )
                    for seq in chosen
                ]
            )
