"""Mixed batches of base and adapters equal PeftModel, adapter by adapter."""

import os
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests.engine.driver import (
    Driver,
    hf_greedy,
    hf_model,
    prompts,
    save_tiny_model,
    sequence,
)
from tests.engine.peft_adapters import ALL, CONFIGS, cache, peft_model, save_adapter
from worker.adapters.loader import load_adapter
from worker.engine.adapter_cache import AdapterCache
from worker.engine.batch import ScheduledBatch
from worker.engine.model_loader import load_model
from worker.engine.model_runner import ModelRunner
from worker.protocol.types import AdapterRef

ROOT = Path(__file__).parents[2]
SMOLLM2 = Path(os.environ.get("BATTEN_MODEL", ROOT / ".cache" / "smollm2-135m-instruct"))


def loaded(adapters: AdapterCache, changed: threading.Semaphore, refs: list[AdapterRef]) -> None:
    """Prepare all of `refs`, waiting for the loader thread."""
    for ref in refs:
        while not adapters.prepare(ref):
            assert changed.acquire(timeout=60)


def serve(base: Path, folders: dict[AdapterRef, Path], rank: int = 32, **runner_options):
    """(runner, driver) with every adapter of `folders` resident."""
    model = load_model(base, "float32")
    changed = threading.Semaphore(0)
    adapters = cache(model, folders, rank, on_change=changed.release)
    runner = ModelRunner(model, adapters=adapters, **runner_options)
    try:
        loaded(adapters, changed, list(folders))
    finally:
        adapters.close()
    return runner, Driver(runner)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def folders(base, tmp_path_factory):
    """One adapter folder for each of CONFIGS."""
    parent = tmp_path_factory.mktemp("adapters")
    saved = {}
    for seed, (name, config) in enumerate(CONFIGS.items()):
        folder = save_adapter(base, parent / name, seed, **config)
        rank = max(
            weights.A.shape[0]
            for weights in load_adapter(
                folder, load_model(base, certified=True).lora_shapes
            ).modules.values()
        )
        saved[AdapterRef(name, rank)] = folder
    return saved


def test_logits_of_one_mixed_batch_equal_peft(base, folders):
    runner, driver = serve(base, folders, num_blocks=80, block_size=4)
    refs = [None, *folders, None]
    sequences = [
        sequence(prompt, ref) for prompt, ref in zip(prompts(len(refs)), refs, strict=True)
    ]
    items = tuple(driver.schedule(item, item.num_tokens) for item in sequences)
    got = runner.logits(ScheduledBatch(items))
    plain = hf_model(base)
    for row, item in zip(got, sequences, strict=True):
        reference = peft_model(base, folders[item.adapter]) if item.adapter else plain
        with torch.inference_mode():
            want = reference(input_ids=torch.tensor([item.prompt_ids])).logits[0, -1]
            effect = (want - plain(torch.tensor([item.prompt_ids])).logits[0, -1]).norm()
        assert (row - want).norm() <= 1e-5 * want.norm()
        assert item.adapter is None or effect > 1e-2 * want.norm()


def test_greedy_tokens_of_chunked_mixed_batches_equal_peft(base, folders):
    _, driver = serve(base, folders, num_blocks=120, block_size=4)
    refs = [None, *list(folders)[:3], *list(folders)[:3], None]
    sequences = [
        sequence(prompt, ref) for prompt, ref in zip(prompts(len(refs)), refs, strict=True)
    ]
    driver.run(sequences, tokens=10)
    for item in sequences:
        reference = peft_model(base, folders[item.adapter]) if item.adapter else hf_model(base)
        assert item.output_ids == hf_greedy(reference, item.prompt_ids, 10)


def test_base_sequences_keep_their_bits_beside_adapters(base, folders):
    """In a mixed pack base tokens come first and no kernel touches them."""
    runner, driver = serve(base, folders, num_blocks=80, block_size=4)
    wild = list(folders)[1]
    prompt = prompts(1, longest=20)[0]
    before = runner.logits(
        ScheduledBatch(tuple(driver.schedule(sequence(prompt), len(prompt)) for _ in range(2)))
    )
    for linear in runner.model.linears.values():
        linear.pool.A.fill_(torch.nan)
    mixed = (sequence(prompt, wild), sequence(prompt))
    after = runner.logits(
        ScheduledBatch(tuple(driver.schedule(item, len(prompt)) for item in mixed))
    )
    assert after[0].isnan().all()
    assert torch.equal(after[1], before[1])


def test_conv1d_models_are_adapted_like_peft(tmp_path):
    base = save_tiny_model(tmp_path / "base", "gpt2")
    folder = save_adapter(
        base,
        tmp_path / "adapter",
        target_modules=["c_attn", "c_proj"],
        r=4,
        fan_in_fan_out=True,
    )
    ref = AdapterRef("gpt2", 4)
    _, driver = serve(base, {ref: folder}, num_blocks=40, block_size=4)
    item = sequence(prompts(1)[0], ref)
    driver.run([item], tokens=8)
    assert item.output_ids == hf_greedy(peft_model(base, folder), item.prompt_ids, 8)


def test_many_adapters_of_scattered_rows(base, tmp_path):
    """Rows that are not neighbours, and more adapters than one product would pay for."""
    folders = {
        AdapterRef(f"a{seed}", rank): save_adapter(
            base, tmp_path / f"a{seed}", seed, target_modules=ALL, r=rank
        )
        for seed, rank in enumerate([3, 5, 4, 5])
    }
    model = load_model(base, "float32")
    changed = threading.Semaphore(0)
    adapters = cache(model, folders, 14, on_change=changed.release)
    a, b, c, d = folders
    loaded(adapters, changed, [a, b, c])
    adapters.pin(b)
    loaded(adapters, changed, [d])  # takes a's 3 rows and the 2 that were free
    adapters.close()
    rows = adapters.rows(d)
    assert rows == (0, 1, 2, 12, 13)
    runner = ModelRunner(model, 60, 4, adapters)
    items = [sequence(prompt, ref) for prompt, ref in zip(prompts(2), [d, b], strict=True)]
    Driver(runner).run(items, tokens=6)
    for item in items:
        reference = peft_model(base, folders[item.adapter])
        assert item.output_ids == hf_greedy(reference, item.prompt_ids, 6)


def example_adapters() -> list[Path]:
    return sorted(path.parent for path in ROOT.glob("examples/adapters/*/adapter_config.json"))


@pytest.mark.skipif(not SMOLLM2.is_dir(), reason=f"no model at {SMOLLM2}: run `make model`")
def test_smollm2_with_trained_adapters_equals_peft(tmp_path):
    """The demo's adapters on its model, in one batch; random ones where none were trained."""
    from worker.protocol import peft

    found = example_adapters() or [
        save_adapter(SMOLLM2, tmp_path / name, seed, target_modules=ALL, r=rank)
        for seed, (name, rank) in enumerate([("eight", 8), ("four", 4)])
    ]
    folders = {}
    for folder in found:
        config = peft.parse_config((folder / peft.CONFIG_FILE).read_bytes())
        header = peft.read_header(folder / peft.WEIGHTS_FILE)
        folders[AdapterRef(folder.name, peft.adapter_rank(config, header))] = folder
    total = sum(ref.rank for ref in folders)
    _, driver = serve(SMOLLM2, folders, total, num_blocks=64, block_size=16)
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "My parcel is late and the box was open. What now?"}],
        add_generation_prompt=True,
        return_dict=False,
    )
    sequences = [sequence(prompt, ref) for ref in [None, *folders]]
    driver.run(sequences, tokens=8, longest_chunk=20)
    first, *others = folders
    model = peft_model(SMOLLM2, folders[first])
    for ref in others:
        model.load_adapter(folders[ref], ref.digest)
    with model.disable_adapter():
        assert sequences[0].output_ids == hf_greedy(model, prompt, 8)
    for item in sequences[1:]:
        model.set_adapter("default" if item.adapter == first else item.adapter.digest)
        assert item.output_ids == hf_greedy(model, prompt, 8)
