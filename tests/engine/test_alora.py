"""Activated LoRA equals PEFT, and computes what lies before its invocation as the base does."""

import random
import sys

import pytest
import torch

from tests.engine.driver import hf_greedy, hf_model, prompts, save_tiny_model, sequence
from tests.engine.peft_adapters import peft_model, save_adapter
from tests.engine.real_engine import RealEngine
from tests.engine.test_peft_parity import serve
from worker.engine.activation import activation
from worker.engine.batch import ScheduledBatch
from worker.protocol.types import AdapterRef, SamplingParams

T = ["q_proj", "v_proj", "down_proj"]
CALL, TWICE = [40, 41, 42], [50, 50]
OPTIONS = {
    "called": {"target_modules": T, "alora_invocation_tokens": CALL},
    "twice": {"target_modules": T, "alora_invocation_tokens": TWICE, "use_rslora": True},
    "head": {"target_modules": [*T, "lm_head"], "alora_invocation_tokens": CALL},
    "biased": {"target_modules": T, "alora_invocation_tokens": CALL, "lora_bias": True},
    "plain": {"target_modules": T},
}
TOKENS = 6


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("base"), "qwen2")


@pytest.fixture(scope="module")
def folders(base, tmp_path_factory):
    parent = tmp_path_factory.mktemp("adapters")
    return {
        AdapterRef(name, 4): save_adapter(base, parent / name, seed, r=4, **config)
        for seed, (name, config) in enumerate(OPTIONS.items())
    }


@pytest.fixture(scope="module")
def greedy(base, folders):
    """PEFT's answer."""
    models = {ref: peft_model(base, folder) for ref, folder in folders.items()}
    models[None] = hf_model(base)
    return lambda prompt, ref, tokens=TOKENS: hf_greedy(models[ref], prompt, tokens)


def called(*where, length=30, call=CALL, seed=3):
    """A prompt in which the invocation begins at each of `where`."""
    rng = random.Random(seed)
    prompt = [rng.randrange(3, 39) for _ in range(length)]
    for start in where:
        prompt[start : start + len(call)] = call
    return prompt


@pytest.mark.parametrize(
    ("prompt", "call", "start"),
    [
        ([1, 2, 3], [], 0),
        ([1, 2, 3], [2, 3], 1),
        ([2, 3, 1, 2, 3, 4], [2, 3], 3),
        ([5, 5, 5], [5, 5], 1),
        ([1, 2], [2, 3], sys.maxsize),
        ([2], [2, 2], sys.maxsize),
        ([], [1], sys.maxsize),
    ],
)
def test_the_last_invocation_counts(prompt, call, start):
    assert activation(tuple(prompt), tuple(call)) == start


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_mixed_batch_equals_peft(base, folders, greedy):
    called_ref, twice, head, biased, plain = folders
    cases = [
        (called(9), called_ref),
        (called(2, 17), called_ref),
        (called(0), called_ref),
        (called(27), called_ref),
        (called(), called_ref),
        (called(11, call=[50, 50, 50]), twice),
        (called(5), head),
        (called(), head),
        (called(13), biased),
        (called(20), plain),
        (called(8), None),
    ]
    runner, driver = serve(base, folders, num_blocks=300, block_size=4)
    items = [sequence(prompt, ref) for prompt, ref in cases]
    for item in items:
        call = (
            OPTIONS[item.adapter.digest].get("alora_invocation_tokens", []) if item.adapter else []
        )
        item.adapter_start = activation(item.prompt_ids, tuple(call))
    whole = ScheduledBatch(tuple(driver.schedule(item, item.num_tokens) for item in items))
    for row, item in zip(runner.logits(whole), items, strict=True):
        model = peft_model(base, folders[item.adapter]) if item.adapter else hf_model(base)
        with torch.inference_mode():
            want = model(input_ids=torch.tensor([item.prompt_ids])).logits[0, -1]
        assert (row - want).norm() <= 1e-5 * want.norm(), item.adapter
    driver.run(items, tokens=TOKENS)
    for item in items:
        assert item.output_ids == greedy(item.prompt_ids, item.adapter), item.adapter


def requests(engine, cases, **sampling):
    """Add all, run, and give (token ids of each choice, usage) by name."""
    for name, (prompt, ref) in cases.items():
        engine.add(name, prompt, params(**sampling), adapter=ref)
    finished = engine.run()
    return {
        name: ([list(choice.token_ids) for choice in finished[name].choices], finished[name].usage)
        for name in cases
    }


def params(**changes):
    return SamplingParams(**{"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, **changes})


def test_base_and_activated_adapters_find_each_others_blocks(base, folders, greedy):
    """Blocks of 4: an invocation at 18 leaves 4 blocks to the base."""
    called_ref, _, head, _, plain = folders
    prompt = called(18)
    engine = RealEngine(base, adapters=folders)
    order = {"base": None, "called": called_ref, "head": head, "again": called_ref, "plain": plain}
    cached = {}
    for name, ref in order.items():
        answers, usage = requests(engine, {name: (prompt, ref)})[name]
        assert answers == [greedy(prompt, ref)], name
        cached[name] = usage.cached
    assert cached == {"base": 0, "called": 16, "head": 16, "again": 28, "plain": 0}
    other = called(18, seed=4)
    assert requests(engine, {"first": (other, called_ref)})["first"][1].cached == 0
    answers, usage = requests(engine, {"then": (other, None)})["then"]
    assert (answers, usage.cached) == ([greedy(other, None)], 16)


def test_one_that_is_not_invoked_is_the_base(base, folders, greedy):
    engine = RealEngine(base, adapters=folders)
    prompt, ref = called(), next(iter(folders))
    answers, _ = requests(engine, {"adapter": (prompt, ref)})["adapter"]
    assert answers == [greedy(prompt, None)] == [greedy(prompt, ref)]
    history = prompt + answers[0]
    assert requests(engine, {"base": (history, None)})["base"][1].cached == 32


def test_the_other_scope_shares_nothing(base, folders):
    engine = RealEngine(base, adapters=folders)
    prompt, ref = called(18), next(iter(folders))
    requests(engine, {"base": (prompt, None)})
    engine.add("stranger", prompt, params(), adapter=ref, cache_scope="another")
    assert engine.run()["stranger"].usage.cached == 0


@pytest.mark.parametrize(("budget", "blocks"), [(5, 32), (64, 41)])
def test_chunks_choices_and_preemption(base, folders, greedy, budget, blocks):
    """All at once in so few blocks that running ones are preempted, with two choices each."""
    refs = [*list(folders), None]
    cases = {
        f"{place} {ref.digest if ref else ''}": (called(place, seed=place), ref)
        for place in (1, 15)
        for ref in refs
    }
    engine = RealEngine(base, adapters=folders, num_blocks=blocks, token_budget=budget)
    answers = requests(engine, cases, n=2, max_tokens=20)
    assert engine.engine.counters.preemptions > 0
    for name, (prompt, ref) in cases.items():
        assert answers[name][0] == [greedy(prompt, ref, 20)] * 2, name


def test_random_prompts_over_a_small_alphabet(base, folders, greedy):
    """Invocations that overlap, end the prompt, or lie across blocks and chunks."""
    rng = random.Random(7)
    _, twice, *_ = folders
    cases = {
        f"{index}": ([rng.choice([50, 50, 7]) for _ in range(rng.randrange(1, 14))], ref)
        for index, ref in enumerate([twice, None] * 8)
    }
    engine = RealEngine(base, adapters=folders, token_budget=7)
    for name, (answers, _) in requests(engine, cases).items():
        assert answers == [greedy(*cases[name])], cases[name]


def test_prompts_of_other_adapters_stay_what_they_are(base, folders, greedy):
    plain = list(folders)[-1]
    engine = RealEngine(base, adapters=folders)
    cases = {f"{index}": (prompt, plain) for index, prompt in enumerate(prompts(3))}
    for name, (answers, _) in requests(engine, cases).items():
        assert answers == [greedy(*cases[name])]
