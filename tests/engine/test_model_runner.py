"""Greedy tokens of packed, chunked, mixed batches equal Hugging Face's generate."""

import json

import pytest
import torch

from kernels.errors import KernelArgumentError
from tests.engine.driver import (
    Driver,
    hf_greedy,
    hf_model,
    prompts,
    save_tiny_model,
    sequence,
)
from worker.engine.batch import ScheduledBatch
from worker.engine.kv_cache import KvLayout, LayerKv
from worker.engine.model_loader import ModelLoadError, eos_ids, load_model, revision
from worker.engine.model_runner import ModelRunner
from worker.protocol.types import AdapterRef


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss"])
def test_greedy_tokens_equal_generate(model_type, tmp_path):
    folder = save_tiny_model(tmp_path, model_type)
    runner = ModelRunner(load_model(folder, "float32"), num_blocks=200, block_size=4)
    sequences = [sequence(prompt) for prompt in prompts(5)]
    Driver(runner).run(sequences, tokens=12)
    reference = hf_model(folder)
    for item in sequences:
        assert item.output_ids == hf_greedy(reference, item.prompt_ids, 12)


def test_logits_equal_the_model_alone(llama):
    runner = ModelRunner(load_model(llama, "float32"), num_blocks=40, block_size=16)
    sequences = [sequence(prompt) for prompt in prompts(6)]
    driver = Driver(runner)
    batch = ScheduledBatch(tuple(driver.schedule(item, item.num_tokens) for item in sequences))
    got = runner.logits(batch)
    reference = hf_model(llama)
    with torch.inference_mode():
        want = torch.cat(
            [reference(torch.tensor([item.prompt_ids])).logits[:, -1] for item in sequences]
        )
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


def test_a_replayed_sequence_continues_the_same(llama):
    """After a preemption the emitted tokens are computed again as part of the prompt."""
    runner = ModelRunner(load_model(llama, "float32"), num_blocks=60, block_size=4)
    driver = Driver(runner)
    first, preempted = (sequence(prompt) for prompt in prompts(2))
    driver.run([first, preempted], tokens=6)
    preempted.block_table, preempted.num_computed = [], 0
    driver.run([first, preempted], tokens=14)
    assert preempted.output_ids == hf_greedy(hf_model(llama), preempted.prompt_ids, 14)


def test_copied_blocks_are_read_like_their_source(llama):
    runner = ModelRunner(load_model(llama, "float32"), num_blocks=40, block_size=4)
    driver = Driver(runner)
    prompt = prompts(1, longest=30)[0] + [7, 8, 9, 10, 11, 12]
    original = sequence(prompt)
    driver.step([driver.schedule(original, len(prompt))])
    whole = len(prompt) // 4 * 4 - 4
    sharing = sequence(prompt)
    driver.schedule(sharing, len(prompt))
    copies = tuple(zip(original.block_table[: whole // 4], sharing.block_table, strict=False))
    sharing.num_computed = whole
    item = driver.schedule(sharing, len(prompt) - whole)
    tokens = runner.execute(ScheduledBatch((item,), block_copies=copies))
    assert tokens[0].token_id == original.output_ids[0]


def test_a_batch_without_a_last_token_samples_nothing(llama):
    runner = ModelRunner(load_model(llama, "float32"), num_blocks=8, block_size=4)
    driver = Driver(runner)
    assert driver.step([driver.schedule(sequence(range(3, 20)), 5)]) == []
    assert runner.execute(ScheduledBatch(())) == []


def test_bfloat16_stays_near_float32(llama):
    exact = ModelRunner(load_model(llama, "float32"), num_blocks=40)
    rounded = ModelRunner(load_model(llama, "bfloat16"), num_blocks=40)
    logits = []
    for runner in (exact, rounded):
        driver = Driver(runner)
        items = tuple(
            driver.schedule(seq, seq.num_tokens) for seq in map(sequence, prompts(6, seed=9))
        )
        logits.append(runner.logits(ScheduledBatch(items)))
    error = (logits[1] - logits[0]).norm() / logits[0].norm()
    assert logits[1].dtype == torch.float32
    assert error < 0.05


def test_an_adapter_without_a_pool_is_an_error(llama):
    runner = ModelRunner(load_model(llama, "float32"), num_blocks=8)
    driver = Driver(runner)
    adapted = sequence([5, 6], AdapterRef("a" * 64, 4))
    with pytest.raises(RuntimeError, match="rank pool"):
        driver.step([driver.schedule(adapted, 2)])


def test_a_block_table_that_is_too_short_is_an_error(llama):
    runner = ModelRunner(load_model(llama, "float32"), num_blocks=8, block_size=4)
    driver = Driver(runner)
    item = driver.schedule(sequence(range(3, 12)), 9)
    item.sequence.block_table.pop()
    with pytest.raises(KernelArgumentError, match="too short"):
        driver.step([item])


def test_what_a_model_needs_is_known(llama):
    model = load_model(llama, "bfloat16")
    assert model.kv_layout == KvLayout.of(
        (LayerKv(layer, 2, 16, 16) for layer in range(3)), torch.bfloat16
    )
    assert model.kv_layout.bytes_per_token == 3 * 2 * 32 * 2
    assert model.kv_layout.num_blocks(memory=3 * 2 * 32 * 2 * 16 * 10 + 5, block_size=16) == 10
    assert model.context_tokens == 256
    assert model.vocab_size == 96
    assert model.eos_ids == {2}
    assert model.lora_shapes["model.layers.1.mlp.down_proj"] == (64, 96)
    assert len(model.linears) == 3 * 7
    assert model.lora_shapes["lm_head"] == (96, 64)


def test_end_tokens_come_from_every_file(llama, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [6, 7]}))
    assert eos_ids(tmp_path) == {5, 6, 7}
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}))
    assert eos_ids(tmp_path) == {6, 7}


def test_the_revision_follows_the_weights(llama, tmp_path):
    same = save_tiny_model(tmp_path / "same")
    assert revision(same) == revision(llama)
    other = save_tiny_model(tmp_path / "other")
    weights = other / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[8 + int.from_bytes(data[:8], "little")] ^= 1
    weights.write_bytes(data)
    assert revision(other) != revision(llama)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ModelLoadError, match="no config"):
        load_model(tmp_path)
