"""Sampling through the whole engine over a real model, against Hugging Face and vLLM's formulas."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.engine.driver import hf_greedy, hf_model, prompts, save_tiny_model
from tests.engine.real_engine import RealEngine
from worker.protocol.types import SamplingParams

TOKENS = 16
Request = tuple[Sequence[int], SamplingParams]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> torch.nn.Module:
    return hf_model(folder)


def random(seed: int, **changes: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": TOKENS, "seed": seed, "top_p": 0.98, **changes})  # type: ignore[arg-type]


def generate(model: torch.nn.Module, prompt: Sequence[int], **options: object) -> list[int]:
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **options)
    return out[0, len(prompt) :].tolist()


@torch.inference_mode()
def by_the_formulas(
    model: torch.nn.Module, prompt: Sequence[int], sampling: SamplingParams
) -> list[int]:
    """Greedy, with vLLM's definitions written out: repetition over prompt and answer, frequency
    and presence over the answer, bias before them."""
    output: list[int] = []
    while len(output) < sampling.max_tokens:
        logits = model(torch.tensor([[*prompt, *output]])).logits[0, -1].float()
        for token, bias in sampling.logit_bias:
            logits[token] += bias
        for token in {*prompt, *output}:
            factor = sampling.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        for token, count in Counter(output).items():
            logits[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
        output.append(int(logits.argmax()))
    return output


@pytest.mark.parametrize("penalty", [0.7, 1.3, 2.5])
def test_repetition_penalty_equals_generate(
    folder: Path, reference: torch.nn.Module, penalty: float
) -> None:
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0, repetition_penalty=penalty)
    asked = prompts(4)
    answers = RealEngine(folder).answers({str(i): (p, sampling) for i, p in enumerate(asked)})
    for index, prompt in enumerate(asked):
        want = generate(
            reference,
            prompt,
            max_new_tokens=TOKENS,
            eos_token_id=None,
            repetition_penalty=penalty,
        )
        assert answers[str(index)] == [want]


def test_penalties_and_bias_equal_their_definitions(
    folder: Path, reference: torch.nn.Module
) -> None:
    asked = prompts(5)
    changes: list[dict[str, object]] = [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.8},
        {"presence_penalty": -1.0, "frequency_penalty": 2.0},
        {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.3},
        {"logit_bias": ((7, 9.0), (8, -50.0)), "repetition_penalty": 1.8, "presence_penalty": 1.0},
    ]
    requests = {
        str(index): (prompt, SamplingParams(max_tokens=TOKENS, temperature=0, **change))  # type: ignore[arg-type]
        for index, (prompt, change) in enumerate(zip(asked, changes, strict=True))
    }
    answers = RealEngine(folder, num_blocks=24, watermark=1.0).answers(requests)
    for name, (prompt, sampling) in requests.items():
        assert answers[name] == [by_the_formulas(reference, prompt, sampling)]


def test_a_seed_gives_the_same_answer_alone_in_any_batch_and_after_preemption(
    folder: Path,
) -> None:
    asked = prompts(6, seed=8)
    requests: dict[str, Request] = {
        str(index): (
            prompt,
            random(
                index,
                temperature=0.7 + 0.2 * index,
                top_k=40,
                n=1 + index % 2,
                presence_penalty=0.4 * (index % 3),
                frequency_penalty=0.1 * index,
                repetition_penalty=1 + 0.1 * (index % 2),
            ),
        )
        for index, prompt in enumerate(asked)
    }
    alone = {
        name: RealEngine(folder).answers({name: request})[name]
        for name, request in requests.items()
    }
    for config in (
        {},
        {"token_budget": 7},
        {"policy": "prefill_first", "max_sequences": 3},
        {"mode": "static", "batch_size": 3, "batch_wait": 0.0},
        {"prefix_caching": False},
    ):
        assert RealEngine(folder, **config).answers(requests) == alone, config
    tight = RealEngine(folder, num_blocks=22, watermark=1.0)
    assert tight.answers(dict(reversed(requests.items()))) == alone
    assert tight.engine.counters.preemptions > 0


def test_choices_differ_share_the_prompt_and_do_not_depend_on_how_many_there_are(
    folder: Path,
) -> None:
    prompt = prompts(1, longest=40, seed=3)[0]
    engine = RealEngine(folder)
    answers = engine.answers({"five": (prompt, random(4, n=5))})["five"]
    assert len({tuple(answer) for answer in answers}) == 5
    counters = engine.engine.counters
    own = len(prompt) - (len(prompt) - 1) // 4 * 4  # tokens after the last shared block
    assert counters.prefill_tokens == len(prompt) + 4 * own
    assert RealEngine(folder).answers({"two": (prompt, random(4, n=2))})["two"] == answers[:2]
    assert RealEngine(folder).answers({"one": (prompt, random(4))})["one"] == answers[:1]


def test_logprobs_are_the_models_own_also_after_prefix_hits_and_preemption(
    folder: Path, reference: torch.nn.Module
) -> None:
    start = prompts(1, longest=40, seed=3)[0]
    engine = RealEngine(folder, num_blocks=16, watermark=1.0)
    sampling = {"logprobs": 4, "temperature": 1.3, "presence_penalty": 0.5}
    for index in range(4):
        engine.add(str(index), [*start, 5 + index], random(index, **sampling))
    finished = engine.run()
    assert engine.engine.counters.preemptions > 0
    assert engine.engine.counters.cached_tokens > 0
    for index in range(4):
        choice = finished[str(index)].choices[0]
        prompt = [*start, 5 + index]
        with torch.inference_mode():
            logits = reference(torch.tensor([[*prompt, *choice.token_ids]])).logits[0]
        want = torch.log_softmax(logits[len(prompt) - 1 : -1].float(), 1)
        assert choice.logprobs is not None
        assert [each.token_id for each in choice.logprobs] == list(choice.token_ids)
        for row, each in zip(want, choice.logprobs, strict=True):
            assert each.logprob == pytest.approx(row[each.token_id].item(), abs=1e-3)
            top = row.topk(4)
            assert [value for _, value in each.top] == pytest.approx(top.values.tolist(), abs=1e-3)
            assert [token for token, _ in each.top] == top.indices.tolist()


def test_answers_end_where_generate_ends_them(folder: Path, tmp_path: Path) -> None:
    """By any of the tokens that the generation config names."""
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    asked = prompts(6)
    plain = hf_model(folder)
    longest = [hf_greedy(plain, prompt, TOKENS) for prompt in asked]
    ends = [longest[0][5], longest[1][3], 2]  # 2 is what config.json says
    config = json.dumps({"eos_token_id": ends, "bos_token_id": 1, "pad_token_id": 0})
    (tmp_path / "generation_config.json").write_text(config)
    model = hf_model(tmp_path)
    greedy = SamplingParams(max_tokens=TOKENS, temperature=0)
    engine = RealEngine(tmp_path, eos=None)
    answers = engine.answers({str(i): (prompt, greedy) for i, prompt in enumerate(asked)})
    lengths = set()
    for index, prompt in enumerate(asked):
        want = generate(model, prompt, max_new_tokens=TOKENS)
        assert answers[str(index)] == [want]
        lengths.add(len(want))
    assert len(lengths) > 1
    ignoring = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    assert RealEngine(tmp_path, eos=None).answers({"on": (asked[0], ignoring)})["on"] == [
        longest[0]
    ]
