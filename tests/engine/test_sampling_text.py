"""Text that leaves the whole engine: stop strings across tokens, characters across tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel

from tests.engine.driver import prompts, save_tiny_model
from tests.engine.harness import Harness
from tests.engine.real_engine import Letters, RealEngine
from worker.engine.batch import SampledToken, ScheduledBatch
from worker.engine.engine import Engine
from worker.engine.outputs import DeltaOutput, FinishedOutput
from worker.protocol.types import RequestId, SamplingParams

REPLACEMENT = "\ufffd"
TEXT = "naïve 🦙🦙 — 日本語, and 👩‍🔬 café"


def byte_tokenizer() -> Tokenizer:
    """Each byte is a token, so that every character beyond ASCII lies across several."""
    vocabulary = {character: index for index, character in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


class Reciter:
    """A runner that says the given tokens, whatever it is asked."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def execute(self, batch: ScheduledBatch) -> list[SampledToken]:
        return [
            SampledToken(self.tokens[len(item.sequence.output_ids)])
            for item in batch.sequences
            if item.samples
        ]


def recite(text: str, sampling: SamplingParams) -> tuple[list[str], FinishedOutput]:
    """(texts of the deltas, the answer) of an engine whose model says `text`."""
    tokenizer = byte_tokenizer()
    host = Harness()
    engine = Engine(
        host.config,
        Reciter(tokenizer.encode(text).ids),
        host.residency,
        tokenizer,
        frozenset(),
        "revision",
    )
    engine.add(RequestId("one"), [1, 2], sampling)
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    [finished] = [each for each in outputs if isinstance(each, FinishedOutput)]
    return [each.text for each in outputs if isinstance(each, DeltaOutput)], finished


def test_no_half_character_is_ever_shown() -> None:
    length = len(TEXT.encode())
    deltas, finished = recite(TEXT, SamplingParams(max_tokens=length))
    assert len(deltas) == length
    assert not any(REPLACEMENT in delta for delta in deltas)
    assert "".join(deltas) == finished.choices[0].text == TEXT


@pytest.mark.parametrize("length", range(1, len(TEXT.encode())))
def test_an_answer_cut_within_a_character_says_so_only_at_its_end(length: int) -> None:
    deltas, finished = recite(TEXT, SamplingParams(max_tokens=length))
    want = byte_tokenizer().decode(list(finished.choices[0].token_ids))
    assert "".join(deltas) == finished.choices[0].text == want
    assert not any(REPLACEMENT in delta for delta in deltas[:-1])
    assert TEXT.startswith(want.rstrip(REPLACEMENT))


@pytest.mark.parametrize("stop", ["🦙🦙", "🦙", "語, and", "é", "‍🔬", "ve 🦙🦙 — 日"])
def test_a_stop_string_of_many_bytes_ends_the_text_before_it(stop: str) -> None:
    length = len(TEXT.encode())
    deltas, finished = recite(TEXT, SamplingParams(max_tokens=length, stop=(stop, "absent")))
    choice = finished.choices[0]
    assert "".join(deltas) == choice.text == TEXT[: TEXT.index(stop)]
    assert choice.finish_reason == "stop"
    seen = TEXT[: TEXT.index(stop) + len(stop)]
    assert len(choice.token_ids) == len(seen.encode()), "it ends with the token that completes it"


def test_stop_strings_cut_a_models_own_text_at_the_first_of_them(tmp_path: Path) -> None:
    """In a batch, for several choices, wherever chunks and preemptions fall."""
    folder = save_tiny_model(tmp_path)
    asked = {str(index): prompt for index, prompt in enumerate(prompts(4, seed=8))}

    def sampling(name: str, *stop: str) -> SamplingParams:
        return SamplingParams(max_tokens=24, seed=int(name), n=2, stop=stop)

    free = RealEngine(folder)
    whole = free.answers({name: (prompt, sampling(name)) for name, prompt in asked.items()})
    texts = {name: [Letters().decode(answer) for answer in whole[name]] for name in asked}
    stops = {name: (texts[name][0][9:12], texts[name][1][5]) for name in asked}
    stopping = RealEngine(folder, num_blocks=22, watermark=1.0, token_budget=9)
    for name, prompt in asked.items():
        stopping.add(name, prompt, sampling(name, *stops[name]))
    finished = stopping.run()
    assert stopping.engine.counters.preemptions > 0
    for name in asked:
        for choice, text in zip(finished[name].choices, texts[name], strict=True):
            ends = [text.find(stop) for stop in stops[name] if stop in text]
            assert choice.text == (text[: min(ends)] if ends else text)
            assert choice.finish_reason == ("stop" if ends else "length")
            assert stopping.streamed(name, choice.index) == choice.text
