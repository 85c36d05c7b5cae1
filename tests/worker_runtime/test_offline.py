"""The offline engine and `python -m worker generate`, on a small random model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM

from kernels import native
from worker.__main__ import main
from worker.protocol.types import SamplingParams
from worker.runtime.errors import ModelUnusable
from worker.runtime.offline import Answer, OfflineEngine, Prompt
from worker.settings import EngineSettings

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(50)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    base = LlamaForCausalLM.from_pretrained(model)
    tuned = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    generator = torch.Generator().manual_seed(1)
    for name, weight in tuned.named_parameters():
        if "lora_B" in name:
            weight.data = torch.randn(weight.shape, generator=generator)
    tuned.save_pretrained(folder)
    return folder


def settings(model: Path) -> EngineSettings:
    return EngineSettings(
        model=str(model), dtype="float32", kv_memory=1 << 20, adapter_rank=8, threads=1
    )


def alone(model: Path, ids: list[int]) -> tuple[int, ...]:
    network = LlamaForCausalLM.from_pretrained(model)
    output = network.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=6,
        do_sample=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return tuple(output[0, len(ids) :].tolist())


def test_answers_come_in_order_and_are_the_models_own(model: Path, adapter: Path) -> None:
    heard: list[Answer] = []
    prompts = [
        Prompt("w1 w2 w3", GREEDY),
        Prompt([1, 2, 3], GREEDY, adapter),
        Prompt([9] * 200, GREEDY),
        Prompt([1, 999], GREEDY),
        Prompt([4, 5], GREEDY, model / "nowhere"),
        Prompt([4, 5], GREEDY),
    ]
    with OfflineEngine(settings(model)) as engine:
        answers = engine.generate(prompts, progress=heard.append)
        stats = engine.stats()
    assert [answer.index for answer in answers] == list(range(6))
    assert sorted(answer.index for answer in heard) == list(range(6))
    assert answers[0].choices[0].token_ids == alone(model, [1, 2, 3])
    assert answers[5].choices[0].token_ids == alone(model, [4, 5])
    assert answers[1].choices[0].token_ids != answers[0].choices[0].token_ids
    assert "context of 128" in (answers[2].error or "")
    assert "vocabulary" in (answers[3].error or "")
    assert "nowhere" in (answers[4].error or "")
    assert stats.adapters.loads == 1
    assert stats.latency["e2e"].count == stats.counters.finished == 3
    assert stats.blocks_used == 0


def test_a_stream_left_early_leaves_nothing_behind(model: Path) -> None:
    with OfflineEngine(settings(model)) as engine:
        stream = engine.stream(Prompt([1 + i % 40], GREEDY) for i in range(10_000))
        first = next(stream)
        stream.close()
        engine.engine.step()
        assert first.error is None
        assert not engine.engine.has_work()


def test_the_command_writes_a_line_for_each_line(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    greedy = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    lines = [
        {"id": "a", "prompt": "w1 w2 w3", **greedy},
        {"prompt_ids": [1, 2, 3], "adapter": str(adapter), **greedy},
        {"prompt_ids": [], **greedy},
    ]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    command = ["generate", str(prompts), "-o", str(answers), "--model", str(model)]
    options = ["--dtype", "float32", "--kv-memory", "1MiB", "--adapter-rank", "8", "--threads", "1"]
    result = CliRunner().invoke(main, [*command, *options])
    assert result.exit_code == 1, result.output
    assert result.stderr.endswith(
        "Error: 1 of 3 lines failed, the first with id 3: the prompt is empty\n"
    )
    first, second, third = map(json.loads, answers.read_text().splitlines())
    assert first["id"] == "a"
    assert tuple(first["choices"][0]["token_ids"]) == alone(model, [1, 2, 3])
    assert second["id"] == 2
    assert second["usage"]["completion"] == 6
    assert third == {"id": 3, "error": "the prompt is empty"}
    prompts.write_text(json.dumps(lines[0]))
    result = CliRunner().invoke(main, [*command, *options])
    assert result.exit_code == 0, result.output


def test_deterministic_answers_are_the_models_own_too(model: Path) -> None:
    sampling = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=2)
    together, one = [Prompt([n, 2, 3], sampling) for n in range(1, 6)], Prompt([1, 2, 3], sampling)
    chosen = replace(settings(model), deterministic=True)
    with OfflineEngine(chosen) as first, OfflineEngine(chosen) as second:
        beside, (by_itself,) = first.generate(together), second.generate([one])
    assert beside[0].choices == by_itself.choices
    assert by_itself.choices[0].token_ids == alone(model, [1, 2, 3])


def test_without_our_kernels_deterministic_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "library", lambda source: None)
    with pytest.raises(ModelUnusable, match=r"--deterministic needs a C\+\+ compiler"):
        OfflineEngine(replace(settings(model), deterministic=True))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "prompts.jsonl:1: "),
        ('{"max_tokens": 3}', "a line has one of prompt, prompt_ids, messages, not none"),
        ('{"prompt": "w1", "best_of": 2}', "unknown: best_of"),
        ('{"prompt": "w1", "max_tokens": "x"}', "max_tokens"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(
    model: Path, tmp_path: Path, line: str, reason: str
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(line)
    result = CliRunner().invoke(main, ["generate", str(prompts), "--model", str(model)])
    assert result.exit_code == 1
    assert reason in result.output


def test_options_before_the_subcommand_are_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--model", "m", "generate", str(tmp_path)])
    assert result.exit_code == 2
    assert "--model must come after generate" in result.output


def test_an_output_without_a_folder_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    output = tmp_path / "nowhere" / "answers.jsonl"
    command = ["generate", str(prompts), "-o", str(output), "--model", str(tmp_path / "no model")]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2
    assert f"there is no folder {output.parent}" in result.output
