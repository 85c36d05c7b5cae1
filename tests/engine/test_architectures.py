"""Greedy tokens through the whole engine equal Hugging Face's generate, architecture by
architecture: chunked prompts, mixed batches, shared prefixes and preemptions included."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.architectures import REFUSED, SERVED, Refused, Served
from tests.engine.driver import hf_greedy, hf_model, prompts, save_tiny_model, tiny_config
from tests.engine.models_document import split_document, table
from tests.engine.real_engine import RealEngine
from worker.engine.certification import UnsupportedArchitecture, certify
from worker.protocol.types import SamplingParams

TOKENS = 14
SOME = [
    pytest.param(each, id=each.name, marks=() if each.fast else pytest.mark.full) for each in SERVED
]


@pytest.mark.parametrize("architecture", SOME)
def test_greedy_tokens_equal_generate(architecture: Served, tmp_path) -> None:
    folder = save_tiny_model(tmp_path, architecture.model_type, **architecture.changes)
    first, *others = prompts(5)
    asked = [first, *others, [*first, *others[0]], [*first, *others[1]]]
    tight: dict[str, Any] = {"token_budget": 11, "watermark": 1.0}
    engine = RealEngine(folder, longest=max(map(len, asked)) + TOKENS, **tight)
    bounded = None not in engine.config.windows  # no sequence outgrows what it was promised
    if bounded:
        engine = RealEngine(folder, num_blocks=26, **tight)
    greedy = SamplingParams(max_tokens=TOKENS, temperature=0)
    answers = engine.answers({str(i): (prompt, greedy) for i, prompt in enumerate(asked)})
    reference = hf_model(folder)
    for index, prompt in enumerate(asked):
        assert answers[str(index)] == [hf_greedy(reference, prompt, TOKENS)]
    assert len({token for [answer] in answers.values() for token in answer}) > 4
    assert engine.engine.counters.preemptions > 0 or bounded
    assert engine.engine.counters.cached_tokens > 0


@pytest.mark.parametrize("architecture", SOME)
def test_what_is_served_passes_the_probe(architecture: Served) -> None:
    certify(tiny_config(architecture.model_type, **architecture.changes))


@pytest.mark.parametrize("architecture", REFUSED, ids=lambda each: each.name)
def test_what_differs_is_refused_by_name(architecture: Refused) -> None:
    config = tiny_config(architecture.model_type, **architecture.changes)
    with pytest.raises(
        UnsupportedArchitecture, match=f"{architecture.model_type}: .*{architecture.error}"
    ):
        certify(config)


def test_the_document_shows_this_table() -> None:
    assert split_document()[1] == table(), "run python -m tests.engine.models_document"
