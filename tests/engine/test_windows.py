"""Layers with a sliding window give up blocks that nothing sees any more."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.engine.architectures import HYBRID
from tests.engine.driver import hf_greedy, hf_model, prompts, save_tiny_model
from tests.engine.harness import Harness
from tests.engine.real_engine import RealEngine
from worker.engine.config import SchedulerConfig
from worker.engine.errors import CapacityExceeded
from worker.engine.kv_cache import KvCache, KvLayout, LayerKv
from worker.engine.sequence import NOWHERE
from worker.protocol.types import SamplingParams

PROMPT = tuple(range(40))


def layers(*windows: int | None) -> list[LayerKv]:
    return [LayerKv(index, 2, 16, 16, window) for index, window in enumerate(windows)]


@pytest.mark.parametrize(
    ("seen", "groups"),
    [
        ([None] * 3, [(None, 3)]),
        ([512] * 3, [(512, 3)]),
        ([512, None] * 13, [(None, 13), (512, 13)]),  # gemma2 2B
        (([512] * 5 + [None]) * 4 + [512] * 2, [(None, 4), *[(512, 4)] * 5, (512, 2)]),  # gemma3 1B
        ([9000, 512, None], [(None, 1), (None, 1), (512, 1)]),  # as long as the context
    ],
)
def test_layers_that_see_equally_far_share_tables(
    seen: list[int | None], groups: list[tuple[int | None, int]]
) -> None:
    layout = KvLayout.of(layers(*seen), torch.float32, context_tokens=9000)
    assert [(group.window, len(group.layers)) for group in layout.groups] == groups
    assert [layer.layer for layer in layout.layers] == list(range(len(seen)))
    tensors = KvCache(layout, 10, 4, "cpu").tensors
    assert sum(tensor.nbytes for tensor in tensors) == 10 * 4 * layout.bytes_per_slot


def test_layers_of_different_shapes_keep_what_the_farthest_seeing_one_needs() -> None:
    odd = [LayerKv(0, 2, 16, 16, 8), LayerKv(1, 2, 32, 32, None), LayerKv(2, 2, 16, 16, 8)]
    layout = KvLayout.of(odd, torch.float32)
    assert layout.windows == (None,)
    assert layout.bytes_per_slot == layout.bytes_per_token == 4 * 2 * (32 + 64 + 32)


def held(harness: Harness) -> list[int]:
    """Blocks that the one running sequence holds in each group."""
    (sequence,) = harness.engine.scheduler.running
    return [sum(block != NOWHERE for block in table) for table in sequence.tables]


@pytest.mark.parametrize("windows", [(9,), (None, 9)])
def test_what_a_long_answer_holds_is_bounded_by_the_window(windows: tuple[int | None, ...]) -> None:
    harness = Harness(windows=windows, num_blocks=100, prefix_caching=False)
    harness.add("long", PROMPT, max_tokens=100)
    most = 0
    while harness.engine.has_work():
        harness.step()
        if harness.engine.scheduler.running:
            most = max(most, held(harness)[-1])
            assert harness.engine.scheduler.blocks.num_used == sum(held(harness))
    assert most == 3  # 8 tokens of the past lie in at most 3 blocks of 4
    assert harness.answers("long") == [harness.runner.expected(PROMPT, "", 0, 100)]


def test_a_pool_smaller_than_the_prompt_serves_a_model_that_sees_no_farther() -> None:
    harness = Harness(windows=(9,), num_blocks=8, token_budget=12)
    harness.add("long", PROMPT, max_tokens=60)
    harness.run()
    assert harness.answers("long") == [harness.runner.expected(PROMPT, "", 0, 60)]


@pytest.mark.parametrize("windows", [(9,), (None, 9), (None, 5, 5), (17, 5)])
def test_limits_are_what_a_sequence_alone_can_reach(windows: tuple[int | None, ...]) -> None:
    sizes = {"windows": windows, "num_blocks": 20, "block_size": 4, "token_budget": 12}
    most = SchedulerConfig(**sizes, context_tokens=400).kv_tokens
    fits = [SchedulerConfig(**sizes).most_blocks(tokens) <= 20 for tokens in range(1, 400)]
    assert all(before or not after for before, after in pairwise(fits)), "it does not turn back"
    assert most == sum(fits)
    harness = Harness(**sizes, watermark=1.0, context_tokens=500)
    prompt = tuple(token % 40 for token in range(min(most, 400) - 10))
    harness.add("longest", prompt, max_tokens=11)
    harness.run()
    assert harness.answers("longest") == [harness.runner.expected(prompt, "", 0, 11)]
    if most < 399:
        with pytest.raises(CapacityExceeded, match=f"holds {most}"):
            harness.add("longer", (*prompt, 1), max_tokens=11)


def test_a_hit_needs_only_the_last_blocks_behind_a_window() -> None:
    harness = Harness(windows=(None, 9), num_blocks=60)
    harness.add("first", PROMPT, max_tokens=8)
    harness.run()
    harness.add("second", [*PROMPT, 1, 2, 3], max_tokens=2)
    assert harness.run()["second"].usage.cached == 40
    harness.add("third", [*PROMPT, 4, 5, 6], max_tokens=8)
    harness.step()
    assert held(harness) == [11, 3]
    harness.run()


def test_a_hit_ends_where_a_windows_blocks_are_gone() -> None:
    """The full group still has most of the first prompt, the window nothing at its end."""
    harness = Harness(windows=(None, 9), num_blocks=24, watermark=1.0, token_budget=8)
    harness.add("first", PROMPT, max_tokens=1)
    harness.run()
    harness.add("other", [40] * 33, max_tokens=1)
    harness.run()
    harness.add("again", [*PROMPT, 7], max_tokens=3)
    (again,) = harness.engine.scheduler.admission.queue
    blocks = harness.engine.scheduler.blocks
    assert (len(blocks.cache.match(again, 10)), len(blocks.match(again))) == (6, 0)
    assert harness.run()["again"].usage.cached == 0
    assert harness.answers("again") == [harness.runner.expected((*PROMPT, 7), "", 0, 3)]


def test_a_prefix_that_was_given_up_in_part_is_found_when_somebody_has_computed_it_again() -> None:
    harness = Harness(windows=(9,), num_blocks=7, token_budget=8)
    harness.add("whole", PROMPT, max_tokens=1)
    harness.run()
    hits = []
    for name, prompt in [("half", PROMPT[:21]), ("half again", PROMPT[:21]), ("again", PROMPT)]:
        harness.add(name, prompt, max_tokens=1)
        hits.append(harness.run()[name].usage.cached)
    assert hits == [0, 20, 20]


def test_what_a_poisoned_sequence_gave_up_is_forgotten_too() -> None:
    harness = Harness(windows=(9,), num_blocks=40)
    harness.add("poison", PROMPT, max_tokens=8)
    harness.step()
    harness.runner.poisoned.add("poison")
    harness.run()
    harness.add("after", PROMPT, max_tokens=2)
    assert harness.run()["after"].usage.cached == 0
    assert len(harness.engine.scheduler.blocks.cache) == 10


TOKENS = 30


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("mistral", {"sliding_window": 8}),
        ("gemma2", {"sliding_window": 8}),
        ("gpt_oss", {"sliding_window": 8, "num_local_experts": 4, "layer_types": HYBRID}),
    ],
)
def test_prompts_far_beyond_the_window_equal_generate(
    tmp_path: Path, model_type: str, changes: dict[str, object]
) -> None:
    """Chunks, hits on shared prefixes, several choices, and pools that are too small."""
    folder = save_tiny_model(tmp_path, model_type, **changes)
    start = [token for prompt in prompts(6, longest=40) for token in prompt][:90]
    asked = [start, *prompts(2), [*start, 7, 8], [*start[:60], 9]]
    reference = hf_model(folder)
    want = [hf_greedy(reference, prompt, TOKENS) for prompt in asked]
    greedy = SamplingParams(max_tokens=TOKENS, temperature=0, n=2)
    requests = {str(index): (prompt, greedy) for index, prompt in enumerate(asked)}
    for longest, budget in ((None, 13), (len(start) + 2 + TOKENS, 7)):
        engine = RealEngine(folder, longest=longest, token_budget=budget, watermark=1.0)
        assert len(engine.engine._runner.cache.layout.groups) > (model_type != "mistral")
        answers = engine.answers(requests)
        for index, tokens in enumerate(want):
            assert answers[str(index)] == [tokens] * 2
        assert engine.engine.counters.cached_tokens > 0 or longest is not None
        waste = engine.engine.counters.waste
        assert 0 < waste < 0.5
