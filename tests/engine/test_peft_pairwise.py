"""Adapters of every pair of PEFT's options equal PEFT: mixed in one batch with each other and the
base, preempted, evicted and reloaded, and with their prompts found in the prefix cache.

`make test` takes a few combinations of each model, `make test-full` all that cover every pair.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.driver import hf_model, save_tiny_model
from tests.engine.pairwise import Combination, config_of, pairwise
from tests.engine.peft_adapters import cache, peft_model, save_adapter, wait_for_loads
from tests.engine.real_engine import Letters
from worker.engine.batch import SampledToken, ScheduledBatch
from worker.engine.config import SchedulerConfig
from worker.engine.engine import Engine
from worker.engine.model_loader import load_model
from worker.engine.model_runner import ModelRunner
from worker.engine.outputs import FailedOutput, FinishedOutput
from worker.protocol import peft
from worker.protocol.types import AdapterRef, RequestId, SamplingParams

TOKENS = 8
CALL = [40, 41]
T = ["q_proj", "v_proj", "down_proj"]
REGEX = r".*layers\.[02]\..*(k_proj|o_proj|up_proj)"

COMMON: dict[str, dict[str, dict[str, Any]]] = {
    "rank": {
        "one": {"r": 1},
        "four": {"r": 4},
        "pattern": {"r": 3, "rank_pattern": {"layers.1.self_attn.q_proj": 6, ".*down_proj": 2}},
    },
    "alpha": {
        "plain": {"lora_alpha": 6},
        "pattern": {"lora_alpha": 4, "alpha_pattern": {"v_proj": 16, "layers.0.+k_proj": 1}},
    },
    "scale": {"alpha/r": {}, "rslora": {"use_rslora": True}},
    "kind": {
        "lora": {},
        "dora": {"use_dora": True},
        "lora_bias": {"lora_bias": True},
    },
    "bias": {"none": {}, "all": {"bias": "all"}, "lora_only": {"bias": "lora_only"}},
    "targets": {
        "list": {"target_modules": T},
        "regex": {"target_modules": REGEX},
        "all-linear": {"target_modules": "all-linear"},
    },
    "exclude": {"none": {}, "list": {"exclude_modules": ["v_proj", "up_proj"]}},
    "layers": {"all": {}, "some": {"layers_to_transform": [0, 2]}},
    "table": {
        "none": {},
        "embedding": {"target_modules": ["embed_tokens"]},
        "head": {"target_modules": ["lm_head"]},
    },
    "saved": {
        "none": {},
        "norms": {"modules_to_save": ["norm", "input_layernorm"]},
        "head": {"modules_to_save": ["lm_head"]},
        "embedding": {"modules_to_save": ["embed_tokens"]},
    },
    "tokens": {"none": {}, "some": {"trainable_token_indices": [5, 7, 60]}},
    "activated": {"no": {}, "yes": {"alora_invocation_tokens": CALL}},
}
GPT2: dict[str, dict[str, dict[str, Any]]] = {
    "fan": {"in_out": {"fan_in_fan_out": True}},
    "rank": {"one": {"r": 1}, "four": {"r": 4}, "pattern": {"r": 3, "rank_pattern": {"c_fc": 5}}},
    "alpha": {"plain": {"lora_alpha": 6}, "pattern": {"alpha_pattern": {"h.1.attn.c_attn": 9}}},
    "scale": COMMON["scale"],
    "kind": {"lora": {}, "dora": {"use_dora": True}, "lora_bias": {"lora_bias": True}},
    "bias": COMMON["bias"],
    "targets": {
        "list": {"target_modules": ["c_attn", "c_fc", "c_proj"]},
        "regex": {"target_modules": r".*h\.[12]\.(attn\.c_attn|mlp\.c_proj)"},
        "all-linear": {"target_modules": "all-linear"},
    },
    "table": {"none": {}, "embedding": {"target_modules": ["wte"]}},
    "saved": {"none": {}, "norms": {"modules_to_save": ["ln_1", "ln_f"]}},
}
EXPERTS: dict[str, dict[str, dict[str, Any]]] = {
    "rank": {"two": {"r": 2}, "pattern": {"r": 3, "rank_pattern": {r".*\.gate_up_proj": 4}}},
    "alpha": {"plain": {"lora_alpha": 6}, "pattern": {"alpha_pattern": {"experts.down_proj": 5}}},
    "scale": COMMON["scale"],
    "bias": {"none": {}, "lora_only": {"bias": "lora_only"}},
    "targets": {"none": {"target_modules": []}, "list": {"target_modules": ["q_proj", "o_proj"]}},
    "parameters": {
        "both": {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
        "down": {"target_parameters": ["experts.down_proj"]},
        "router": {"target_parameters": ["experts.gate_up_proj", "gate.weight"]},
        "none": {},
    },
    "saved": {"none": {}, "norms": {"modules_to_save": ["norm"]}},
}
CONTRADICTIONS = [
    # PEFT's own
    {"layers": "some", "targets": "regex"},
    {"layers": "some", "targets": "all-linear"},
    {"kind": "lora_bias", "table": "embedding"},
    {"table": "embedding", "targets": "regex"},
    {"table": "embedding", "targets": "all-linear"},
    {"table": "head", "targets": "regex"},
    {"table": "head", "targets": "all-linear"},
    {"activated": "yes", "kind": "dora"},
    {"activated": "yes", "table": "embedding"},
    {"targets": "none", "parameters": "none"},
    {"table": "embedding", "saved": "embedding"},
    {"table": "head", "saved": "head"},
    {"table": "embedding", "tokens": "some"},
    {"saved": "embedding", "tokens": "some"},
    # refused here, by name
    *({"activated": "yes", "saved": saved} for saved in ("norms", "head", "embedding")),
    *({"activated": "yes", "bias": bias} for bias in ("all", "lora_only")),
    {"activated": "yes", "tokens": "some"},
]
TIED = [
    {"saved": "head", "tokens": "some"},
    {"table": "head", "tokens": "some", "kind": "dora"},
]
MODELS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "untied": ("qwen2", {}, COMMON),
    "tied": ("qwen2", {"tie_word_embeddings": True}, COMMON),
    "conv1d": ("gpt2", {}, GPT2),
    "experts": ("mixtral", {}, EXPERTS),
}
IN_MAKE_TEST = {"untied": 7, "tied": 4, "conv1d": 3, "experts": 3}


def valid(kind: str, part: Combination) -> bool:
    clashes = [*CONTRADICTIONS, *(TIED if kind == "tied" else [])]
    return not any(clash.items() <= part.items() for clash in clashes)


def combinations(kind: str) -> list[Combination]:
    options = MODELS[kind][2]
    factors = {name: list(values) for name, values in options.items()}
    return pairwise(factors, partial(valid, kind))


@dataclass
class Recorder:
    """A runner that keeps every row of logits, and chooses the largest."""

    runner: ModelRunner
    rows: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def execute(self, batch: ScheduledBatch) -> list[SampledToken]:
        self.runner.cache.copy(batch.block_copies)
        if not batch.sequences:
            return []
        rows = self.runner.logits(batch)
        sampling = [each.sequence for each in batch.sequences if each.samples]
        for sequence, row in zip(sampling, rows, strict=True):
            self.rows.setdefault(sequence.request_id, []).append(row.clone())
        return [SampledToken(int(row.argmax())) for row in rows]


def prompt_of(rng: random.Random) -> list[int]:
    """With the invocation of activated adapters somewhere, so that they apply."""
    prompt = [rng.randrange(3, 39) for _ in range(rng.randint(8, 30))]
    where = rng.randrange(len(prompt) - 2)
    prompt[where : where + 2] = CALL
    return prompt


class Served:
    """Every adapter and the base in an engine with too few rank rows and blocks for all."""

    def __init__(self, base: Path, folders: Mapping[AdapterRef, Path]) -> None:
        model = load_model(base, "float32", certified=True)
        rank = 2 * max(ref.rank for ref in folders) + 2
        self.adapters = cache(model, folders, rank)
        blocks = 15 * len(model.kv_layout.windows)
        config = SchedulerConfig(
            num_blocks=blocks,
            block_size=4,
            windows=model.kv_layout.windows,
            token_budget=48,
            adapter_rank=rank,
            context_tokens=model.context_tokens,
        )
        self.recorder = Recorder(ModelRunner(model, blocks, 4, self.adapters))
        self.engine = Engine(
            config, self.recorder, self.adapters, Letters(), frozenset(), model.revision
        )

    def answer(self, requests: Sequence[tuple[str, list[int], AdapterRef | None]]) -> None:
        sampling = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
        for name, prompt, adapter in requests:
            self.engine.add(RequestId(name), prompt, sampling, adapter=adapter, predicted_output=1)
        finished = 0
        while self.engine.has_work():
            for output in self.engine.step():
                assert not isinstance(output, FailedOutput), output
                finished += isinstance(output, FinishedOutput)
            wait_for_loads(self.adapters)
        assert finished == len(requests)

    def close(self) -> None:
        self.adapters.close()


def save(base: Path, folder: Path, options: Any, chosen: list[Combination]) -> Any:
    """{adapter: folder}"""
    folders = {}
    for seed, combination in enumerate(chosen):
        target = folder / f"adapter-{seed}"
        save_adapter(base, target, seed, **config_of(options, combination))
        config = peft.parse_config((target / peft.CONFIG_FILE).read_bytes())
        header = peft.read_header(target / peft.WEIGHTS_FILE)
        folders[AdapterRef(f"adapter-{seed}", peft.adapter_rank(config, header))] = target
    return folders


def check(kind: str, chosen: list[Combination], tmp_path: Path) -> tuple[float, float]:
    """Largest relative error, least effect of an adapter."""
    model_type, changes, options = MODELS[kind]
    base = save_tiny_model(tmp_path / "base", model_type, **changes)
    folders = save(base, tmp_path, options, chosen)
    served = Served(base, folders)
    rng = random.Random(1)
    refs: list[AdapterRef | None] = [*folders, *([None] * 4)]
    prompts = [prompt_of(rng) for _ in refs]
    waves = ("first", "again")
    try:
        requests = list(enumerate(zip(prompts, refs, strict=True)))
        for wave in waves:
            served.answer(
                [
                    (f"{twin}-{n}", prompt, ref)
                    for n, (prompt, ref) in requests
                    for twin in (wave, f"{wave} twin")
                ]
            )
        stats = served.engine.stats()
    finally:
        served.close()
    assert stats.counters.preemptions
    assert stats.counters.cached_tokens
    if len(folders) > 3:
        assert stats.adapters.evictions
        assert stats.adapters.loads > len(folders), "some were loaded again"
    plain = hf_model(base)
    worst, least = 0.0, float("inf")
    for number, (prompt, ref) in enumerate(zip(prompts, refs, strict=True)):
        reference = peft_model(base, folders[ref]) if ref else plain
        what = chosen[number] if ref else "base"
        for wave in (*waves, *(f"{wave} twin" for wave in waves)):
            rows = torch.stack(served.recorder.rows[f"{wave}-{number}"])
            tokens = rows.argmax(1).tolist()
            ids = torch.tensor([[*prompt, *tokens[:-1]]])
            with torch.inference_mode():
                want = reference(input_ids=ids).logits[0, len(prompt) - 1 :]
                unchanged = plain(input_ids=ids).logits[0, len(prompt) - 1 :]
            error = float(((rows - want).norm(dim=1) / want.norm(dim=1)).max())
            assert error <= 1e-5, (wave, what, error)
            assert tokens == want.argmax(1).tolist(), (wave, what)
            worst = max(worst, error)
            if ref is not None:
                least = min(least, float((unchanged - want).norm() / want.norm()))
    assert least > 1e-4, "an adapter that changes nothing proves nothing"
    return worst, least


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", MODELS)
def test_some_pairs_of_options_equal_peft(kind: str, tmp_path: Path) -> None:
    chosen = random.Random(3).sample(combinations(kind), IN_MAKE_TEST[kind])
    check(kind, chosen, tmp_path)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", MODELS)
def test_all_pairs_of_options_equal_peft(kind: str, tmp_path: Path) -> None:
    chosen = combinations(kind)
    worst, least = check(kind, chosen, tmp_path)
    sys.stderr.write(f"\n{kind}: {len(chosen)} adapters, error {worst:.1e}, effect {least:.1e}\n")


@pytest.mark.parametrize("kind", MODELS)
def test_every_pair_that_may_meet_is_covered(kind: str) -> None:
    chosen = combinations(kind)
    assert all(valid(kind, each) for each in chosen)
    met = {pair for each in chosen for pair in itertools.combinations(each.items(), 2)}
    factors = MODELS[kind][2]
    for one, other in itertools.combinations(factors, 2):
        for pair in itertools.product(factors[one], factors[other]):
            named = ((one, pair[0]), (other, pair[1]))
            assert named in met or not valid(kind, dict(named)), named
