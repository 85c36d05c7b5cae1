"""Bodies become sampling parameters, or are refused with the name of what is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import BadRequest
from gateway.jobs.generation import CHAT, COMPLETIONS, fit, parse_generation
from gateway.jobs.ordering import queue_order, sort_key
from gateway.kit.prompts import Prompts, load_prompts
from worker.protocol.types import SamplingParams, WorkerLimits

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def prompts(tiny_model: Path) -> Prompts:
    return load_prompts(str(tiny_model))


def test_every_parameter_arrives(prompts: Prompts) -> None:
    body = BODY | {
        "max_completion_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "logit_bias": {"9": -100, "3": 1.5},
        "logprobs": True,
        "top_logprobs": 4,
        "n": 3,
        "stop": ["a", "b", "a"],
        "seed": 42,
        "ignore_eos": True,
        "user": "someone",
        "metadata": {"k": "v"},
        "response_format": {"type": "text"},
        "tools": [],
    }
    assert parse_generation(CHAT, body, prompts, None).sampling == SamplingParams(
        max_tokens=7,
        seed=42,
        n=3,
        temperature=0.5,
        top_p=0.9,
        top_k=0,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias=((3, 1.5), (9, -100)),
        logprobs=4,
        stop=("a", "b"),
        ignore_eos=True,
    )


def test_a_seed_is_pinned_once(prompts: Prompts) -> None:
    first = parse_generation(CHAT, BODY, prompts, None).sampling.seed
    assert first != parse_generation(CHAT, BODY, prompts, None).sampling.seed
    assert parse_generation(CHAT, BODY, prompts, first).sampling.seed == first
    negative = parse_generation(CHAT, BODY | {"seed": -5}, prompts, None).sampling.seed
    assert 0 <= negative < 2**63
    assert parse_generation(CHAT, BODY | {"seed": -5}, prompts, negative).sampling.seed == negative


def test_text_parts_are_joined_and_developers_are_the_system(prompts: Prompts) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"messages": [{"role": "developer", "content": parts}]}
    generation = parse_generation(CHAT, body, prompts, None)
    assert generation.prompt_ids == prompts.encode("system: a\nb\nassistant: ")
    assert generation.prefix == "a\nb"


@pytest.mark.parametrize(
    ("changed", "param", "code"),
    [
        ({"messages": None}, "messages", "missing_required_parameter"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": ["x"]}, "messages[0]", "invalid_type"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            "unsupported_parameter",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]},
            "messages[0].tool_calls",
            "unsupported_parameter",
        ),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": 5.5}, "max_tokens", "invalid_type"),
        ({"max_tokens": True}, "max_tokens", "invalid_type"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "invalid_value"),
        ({"temperature": 2.1}, "temperature", "invalid_value"),
        ({"temperature": 10**400}, "temperature", "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_type"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"top_k": -2}, "top_k", "invalid_value"),
        ({"min_p": 1.5}, "min_p", "invalid_value"),
        ({"presence_penalty": 3}, "presence_penalty", "invalid_value"),
        ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
        ({"logit_bias": [1]}, "logit_bias", "invalid_type"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", "invalid_value"),
        ({"logit_bias": {"999": 1}}, "logit_bias.999", "invalid_value"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1", "invalid_value"),
        ({"logprobs": 3}, "logprobs", "invalid_type"),
        ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"stop": [""]}, "stop", "invalid_value"),
        ({"stop": 5}, "stop", "invalid_type"),
        ({"seed": 2**63}, "seed", "invalid_value"),
        ({"ignore_eos": 1}, "ignore_eos", "invalid_type"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"tools": [{}]}, "tools", "unsupported_parameter"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "unsupported_parameter"),
        ({"prompt": "x"}, "prompt", "unsupported_parameter"),
    ],
)
def test_what_is_wrong_is_named(
    prompts: Prompts, changed: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_generation(CHAT, BODY | changed, prompts, None)
    assert (caught.value.param, caught.value.code) == (param, code)


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        (None, "missing_required_parameter"),
        ("", "invalid_value"),
        (["a", "b"], "invalid_type"),
        ([999_999], "invalid_value"),
        ([True], "invalid_type"),
        (5, "invalid_type"),
    ],
)
def test_prompts_that_are_not_one_prompt(prompts: Prompts, prompt: Any, code: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_generation(COMPLETIONS, {"prompt": prompt}, prompts, None)
    assert (caught.value.param, caught.value.code) == ("prompt", code)


def test_what_fits(prompts: Prompts) -> None:
    generation = parse_generation(COMPLETIONS, {"prompt": "x" * 90}, prompts, None)
    assert fit(generation, 100, None, 1024) == 10
    assert fit(generation, 100, None, 4) == 4
    assert fit(generation, 100, WorkerLimits(95, 1000, 8), 1024) == 5
    for context, limits, code in (
        (90, None, "context_length_exceeded"),
        (100, WorkerLimits(100, 99, 8), "capacity_exceeded"),
    ):
        with pytest.raises(BadRequest) as caught:
            fit(generation, context, limits, 1024)
        assert caught.value.code == code


def test_order_follows_due_time_then_shared_prefix() -> None:
    keys = [
        sort_key(1_000, "r1", "be brief", 3),
        sort_key(1_999, "r1", "be brief", 9),
        sort_key(2_000, None, "", 1),
    ]
    assert keys == sorted(keys)
    first, second, third = (queue_order(key) for key in keys)
    assert first == second < third
    assert queue_order(sort_key(1_000, "r2", "be brief")) != first


@pytest.fixture
def opinionated(tiny_model: Path, tmp_path: Path) -> Path:
    """A model whose makers recommend how to sample."""
    folder = tmp_path / "opinionated"
    shutil.copytree(tiny_model, folder)
    config = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    ignored = {"do_sample": False, "max_new_tokens": 5, "min_p": 7, "eos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(config | ignored))
    return folder


def test_a_models_own_sampling_defaults_fill_what_is_left_out(opinionated: Path) -> None:
    generation = parse_generation(CHAT, BODY | {"top_p": None}, load_prompts(str(opinionated)), 3)
    assert generation.max_tokens is None
    assert generation.sampling == SamplingParams(
        max_tokens=0, seed=3, temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05
    )


def test_explicit_values_win_even_neutral_ones(opinionated: Path) -> None:
    neutral = {"temperature": 1, "top_p": 1, "top_k": 0, "repetition_penalty": 1}
    prompts = load_prompts(str(opinionated))
    for body in (neutral, neutral | {"top_k": -1}):
        assert parse_generation(CHAT, BODY | body, prompts, 3).sampling == SamplingParams(
            max_tokens=0, seed=3
        )


def test_the_models_defaults_can_be_turned_off(opinionated: Path) -> None:
    prompts = load_prompts(str(opinionated), neutral=True)
    assert parse_generation(CHAT, BODY, prompts, 3).sampling == SamplingParams(max_tokens=0, seed=3)
