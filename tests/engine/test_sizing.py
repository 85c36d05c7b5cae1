"""The plan's arithmetic, against an engine that runs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from worker.__main__ import main
from worker.engine.model_size import model_size
from worker.engine.sizing import (
    MemoryPlan,
    ModelSize,
    Roofline,
    memory_for_kv,
    packs,
    plan_memory,
)
from worker.runtime import memory
from worker.runtime.memory import peak_memory
from worker.runtime.offline import OfflineEngine
from worker.settings import EngineSettings

ROOT = Path(__file__).parent.parent.parent

SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
SIZE = ModelSize(
    parameters=1000,
    active_parameters=1000,
    weights=2000,
    kv_token=10,
    kv_slot=10,
    adapter_rank=5,
    activations=370,
    attention_flops=0,
    context_tokens=100,
)


LIMITS: dict[str, Any] = {"kv_memory": 1 << 20, "adapter_rank": 8, "adapter_memory": 30}


def settings_of(folder: Path, **changes: Any) -> EngineSettings:
    return EngineSettings(
        model=str(folder), **{"dtype": "float32", "threads": 1, **LIMITS, **changes}
    )


def plan_for(size: ModelSize, **changes: Any) -> MemoryPlan:
    machine = {"device_type": "cpu", "free_memory": 1 << 30, "block_size": 8}
    return plan_memory(size, **{**machine, **LIMITS, **changes})


def save(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder)
    vocabulary = {f"w{i}": i for i in range(50)}
    Tokenizer(WordLevel(vocabulary, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("tied", [False, True])
def test_the_plan_is_what_an_engine_takes(tmp_path: Path, tied: bool) -> None:
    config = LlamaConfig(**{**SMALL, "tie_word_embeddings": tied})
    folder = save(tmp_path, LlamaForCausalLM(config))
    size = model_size(folder, torch.float32)
    with OfflineEngine(settings_of(folder)) as offline:
        engine = offline.engine
        model = engine._runner.model
        parameters = {id(p): p for p in model.packed.module.parameters()}.values()
        pool = [
            tensor
            for layer in model.linears.values()
            for tensor in (layer.pool.A, layer.pool.B, layer.pool.scales, layer.pool.addresses)
        ]
        plan = plan_for(size, block_size=engine.config.block_size)
        assert size.parameters == sum(p.numel() for p in parameters)
        assert plan.weights == sum(p.nbytes for p in parameters)
        assert plan.adapters == sum(tensor.nbytes for tensor in pool)
        assert size.kv_token == model.kv_layout.bytes_per_token
        assert plan.blocks == engine.config.num_blocks
        assert plan.kv_tokens == plan.blocks * engine.config.block_size
        cache = [t for layer in range(2) for t in engine._runner.cache.layer(layer)]
        assert plan.blocks * plan.block_size * size.kv_token == sum(t.nbytes for t in cache)
        assert size.context_tokens == engine.config.context_tokens


def test_only_the_chosen_experts_are_active(tmp_path: Path) -> None:
    config = MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=1)
    model = MixtralForCausalLM(config)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    model.save_pretrained(tmp_path)
    size = model_size(tmp_path, torch.bfloat16)
    table = 50 * 32
    assert size.active_parameters == size.parameters - table - experts * 3 // 4


def test_a_model_without_rotary_positions_is_sized_too(tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4))
    model.save_pretrained(tmp_path)
    size = model_size(tmp_path, torch.float32)
    assert size.weights == sum(p.nbytes for p in model.parameters())
    assert size.kv_token == 2 * 2 * 32 * 4


def test_the_rest_of_the_device_goes_to_keys_and_values() -> None:
    plan = plan_for(SIZE, device_type="cuda", free_memory=9000, kv_memory=None, adapter_rank=4)
    assert plan.keys_values == 9000 - 2000 - 20 - 30 - 370
    assert plan.blocks == plan.keys_values // 80


def test_a_share_of_the_rest_of_a_cpus_memory_does() -> None:
    size = replace(SIZE, packable=1500)
    plan = plan_for(size, free_memory=9000, kv_memory=None, adapter_rank=4)
    assert plan.packed == 1500
    assert plan.keys_values == (9000 - 2000 - 1500 - 20 - 30 - 370) // 8
    tight = plan_for(size, free_memory=7999, kv_memory=None, adapter_rank=4)
    assert tight.packed == 0
    assert tight.keys_values == (7999 - 2000 - 20 - 30 - 370) // 8


@pytest.mark.parametrize(
    ("packable", "free", "wanted", "expected"),
    [
        (100, 400, None, True),
        (100, 399, None, False),
        (100, 0, True, True),
        (100, 400, False, False),
        (0, 400, True, False),
    ],
)
def test_weights_are_copied_where_they_fit_or_as_asked(
    packable: int, free: int, wanted: bool | None, expected: bool
) -> None:
    assert packs(packable, free, wanted) is expected


MACHINE = """
import json, sys
import torch
from structlog.testing import capture_logs
from worker.runtime import memory
from worker.runtime.offline import OfflineEngine
from worker.settings import EngineSettings

def settings(folder):
    return EngineSettings(
        model=folder, dtype=sys.argv[3], threads=1, adapter_rank=64, adapter_memory=30,
        max_sequences=16, token_budget=64,
    )

with OfflineEngine(settings(sys.argv[1])):  # what libraries load at their first use
    pass
memory._give_back_freed_memory()
before = memory._status("VmRSS"), memory._status("RssAnon")
memory._machine_free = lambda: (1 << 30) + before[1] - memory._status("RssAnon")
free = memory.free_memory(torch.device("cpu"))
with capture_logs() as logs, OfflineEngine(settings(sys.argv[2])) as offline:
    for weight in offline.engine._runner.model.packed.module.parameters():
        weight.amax()  # rows of a mapped embedding are read from its file when they are needed
    memory._give_back_freed_memory()
    taken = memory._status("VmRSS") - before[0]
(loaded,) = [entry for entry in logs if entry["event"] == "model_loaded"]
print(json.dumps({"free": free, "taken": taken, **loaded}))
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_worker_takes_what_the_plan_foretells(tmp_path: Path, dtype: str) -> None:
    """From a bfloat16 file, on a machine with one free GiB. In a process of its own; what it takes
    altogether lies within a tenth of the plan, what keys and values get within a fifth."""
    wide = {"hidden_size": 512, "intermediate_size": 1536, "vocab_size": 32_000}
    model = LlamaForCausalLM(LlamaConfig(**{**SMALL, **wide})).bfloat16()
    folder = save(tmp_path / "wide", model)
    small = save(tmp_path / "small", LlamaForCausalLM(LlamaConfig(**SMALL)).to(model.dtype))
    done = subprocess.run(
        [sys.executable, "-c", MACHINE, str(small), str(folder), dtype],
        capture_output=True,
        text=True,
        check=True,
    )
    worker = json.loads(done.stdout.splitlines()[-1])
    limits = {"token_budget": 64, "max_sequences": 16, "adapter_rank": 64}
    plan = plan_for(
        model_size(folder, getattr(torch, dtype), **limits),
        free_memory=worker["free"],
        adapter_rank=64,
        kv_memory=None,
    )
    assert bool(plan.packed) is worker["packed"]
    assert plan.weights == worker["weights"]
    assert plan.adapters == worker["adapter_pool"]
    assert worker["kv_memory"] == pytest.approx(plan.keys_values, rel=0.2)
    parts = plan.weights + plan.packed + plan.adapters + worker["kv_memory"]
    assert worker["taken"] == pytest.approx(parts, rel=0.1)


def test_shared_tokens_are_stored_once() -> None:
    plan = MemoryPlan(
        weights=0,
        adapters=0,
        adapter_memory=0,
        activations=0,
        keys_values=0,
        blocks=20,
        block_size=8,
    )
    assert plan.sequences(17) == 20 // 3
    assert plan.sequences(17, shared=16) == 18
    assert plan.sequences(16, shared=16) == 19
    assert plan.sequences(8 * 21) == 0


def plan_of(windows: tuple[int | None, ...], blocks: int) -> MemoryPlan:
    return MemoryPlan(
        weights=0,
        adapters=0,
        adapter_memory=0,
        activations=0,
        keys_values=0,
        blocks=blocks,
        block_size=8,
        windows=windows,
    )


def test_windows_bound_what_long_sequences_hold() -> None:
    plan = plan_of((None, 33), 200)
    assert plan.sequences(32) == 200 // 8
    assert plan.sequences(800) == 200 // (100 + 5)
    assert plan.sequences(800, shared=400) == 150 // (50 + 5), "the window has left them behind"
    assert plan.sequences(48, shared=40) == (200 - 5 - 5) // 2, "they are still in reach"
    assert plan_of((33,), 60).sequences(8000) == 60 // 5


@pytest.mark.parametrize("window", [None, 16])
def test_a_hybrid_plan_is_what_an_engine_takes(tmp_path: Path, window: int | None) -> None:
    config = Gemma2Config(**{**SMALL, "head_dim": 8, "sliding_window": window or 500})
    folder = save(tmp_path, Gemma2ForCausalLM(config))
    size = model_size(folder, torch.float32)
    with OfflineEngine(settings_of(folder)) as offline:
        engine = offline.engine
        plan = plan_for(size, block_size=engine.config.block_size)
        groups = 2 if window else 1
        assert plan.windows == engine.config.windows
        assert len(plan.windows) == groups
        block = engine.config.block_size * size.kv_token
        assert plan.blocks == engine.config.num_blocks == (1 << 20) * groups // block
        assert sum(tensor.nbytes for tensor in engine._runner.cache.tensors) == 1 << 20


@pytest.mark.parametrize("model_class", ["llama", "gemma2"])
def test_a_start_measures_about_what_the_plan_foretells(tmp_path: Path, model_class: str) -> None:
    """Within a factor of two: the plan sees tensors, the start all that its process takes (one of
    its own: this one's heap has holes from other tests)."""
    wide = {**SMALL, "hidden_size": 256, "intermediate_size": 2048, "vocab_size": 40_000}
    if model_class == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**wide))
    else:
        model = Gemma2ForCausalLM(Gemma2Config(**wide, head_dim=64, sliding_window=64))
    folder = save(tmp_path, model)
    limits: dict[str, Any] = {"token_budget": 512, "max_sequences": 64, "adapter_rank": 32}
    code = f"""
from pathlib import Path
from tests.engine.test_sizing import settings_of
from worker.runtime import build_hf
from worker.runtime.offline import OfflineEngine

build_hf.memory_for_kv = lambda free, activations, _: print(activations) or 1 << 20
with OfflineEngine(settings_of(Path({str(folder)!r}), kv_memory=None, **{limits!r})) as offline:
    assert offline.engine.config.num_blocks > 0
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    measured = int(done.stdout.split()[0])
    foretold = model_size(folder, torch.float32, **limits).activations
    assert foretold > 10 << 20, "too little to be told from noise"
    assert foretold / 2 <= measured <= foretold * 2


def test_memory_that_is_taken_and_given_back_is_seen() -> None:
    """In a process of its own, as a worker starts: this one's heap has holes from other tests."""
    code = """
import torch
from worker.runtime.memory import peak_memory

def action():
    for _ in range(3):
        torch.zeros(8 << 20).add_(1)  # 32 MiB

print(peak_memory(torch.device("cpu"), action))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 31 << 20 <= int(done.stdout) < 48 << 20  # the kernel counts in batches of pages


def test_without_a_high_water_mark_tensors_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_reset_high_water_mark", lambda: False)

    def action() -> None:
        kept = torch.zeros(1000)
        (kept + 1) * 2

    assert peak_memory(torch.device("cpu"), action) == 3 * 4000


def test_activations_are_kept_free() -> None:
    assert memory_for_kv(1000, 400, "cuda") == 600
    assert memory_for_kv(1000, 400, "cpu") == 75
    assert memory_for_kv(100, 400, "cuda") == 0


def test_a_groups_cached_files_count_as_free_like_the_machines(tmp_path: Path) -> None:
    contents = {
        "memory.max": "1000\n",
        "memory.current": "700\n",
        "memory.stat": "anon 300\nactive_file 250\ninactive_file 150\n",
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    assert memory._group_free(tmp_path) == 700
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._group_free(tmp_path) > 1 << 50
    assert memory._group_free(tmp_path / "none") > 1 << 50


@pytest.mark.parametrize("context", [0, 20])
def test_the_roofline_turns_where_computing_begins_to_take_longer(context: int) -> None:
    roofline = Roofline(flops=100_000.0, bandwidth=50_000.0)
    batch = roofline.compute_bound_from(SIZE, context)
    assert batch is not None
    reading = lambda count: (2000 + count * context * 10) / 50_000  # noqa: E731
    computing = lambda count: count * 2000 / 100_000  # noqa: E731
    assert computing(batch) >= reading(batch)
    assert batch == 1 or computing(batch - 1) < reading(batch - 1)
    assert roofline.step_seconds(SIZE, batch, context) == computing(batch)


def test_long_contexts_are_never_bound_by_computing() -> None:
    assert Roofline(100_000.0, 50_000.0).compute_bound_from(SIZE, 1000) is None


def test_the_command_reports_without_weights(tmp_path: Path) -> None:
    LlamaConfig(**SMALL, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    options = ["--device", "h100", "--length", "64", "--adapter-rank", "8"]
    result = CliRunner().invoke(main, ["plan", str(tmp_path), "--dtype", "bfloat16", *options])
    assert result.exit_code == 0, result.output
    assert "(128 bytes per token)" in result.output
    assert "of 64 tokens: " in result.output
    assert "bound by computing from" in result.output


def test_an_unknown_device_is_refused_by_name(tmp_path: Path) -> None:
    LlamaConfig(**SMALL).save_pretrained(tmp_path)
    result = CliRunner().invoke(main, ["plan", str(tmp_path), "--device", "abacus"])
    assert result.exit_code == 1
    assert "no such device: abacus; known are cpu, l4" in result.output
