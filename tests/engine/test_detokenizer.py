"""Text while it comes equals the text of the whole, for the decoders that models use."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from worker.engine.detokenizer import ChoiceText, Detokenizer, StopStrings, byte_tokens

SMOLLM2 = Path(__file__).parents[2] / ".cache/smollm2-135m-instruct/tokenizer.json"

TEXTS = [
    "plain words, and more of them",
    "naïve café — “quoted” … ünïcödé",
    "日本語のテキスト 한국어 العربية",
    "🙂 family: 👩‍👩‍👧‍👦 flag: 🇩🇪 tone: 👍🏽",
    "  leading and   inner   spaces \n\t\n tabs  ",
    "already broken: \ufffd\ufffd and on",
]


def byte_level() -> Tokenizer:
    """One token for each byte, a few merges, two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("ð", "Ł"), ("ðŁ", "ĺ")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|im|>")])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Pieces with ▁ for spaces, unknown characters as byte tokens, the first space stripped."""
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for piece in ["▁", *"abcdefghijklmnopqrstuvwxyz,.", "▁the", "▁and", "é"]:
        vocabulary[piece] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


TOKENIZERS = {"byte-level": byte_level(), "sentencepiece": sentencepiece()}
if SMOLLM2.exists():
    TOKENIZERS["smollm2"] = Tokenizer.from_file(str(SMOLLM2))

each_tokenizer = pytest.mark.parametrize("name", list(TOKENIZERS))


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, byte_tokens(tokenizer))
    return [*map(detokenizer.push, ids), detokenizer.finish()]


@each_tokenizer
@pytest.mark.parametrize("text", TEXTS)
def test_real_text(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@each_tokenizer
@settings(max_examples=150, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), length=st.integers(0, 60))
def test_any_tokens(name: str, seed: int, length: int) -> None:
    tokenizer = TOKENIZERS[name]
    rng = random.Random(seed)
    few = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(6)]
    ids = [
        rng.choice([rng.choice(few), rng.randrange(tokenizer.get_vocab_size())])
        for _ in range(length)
    ]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@each_tokenizer
def test_half_characters_are_held_back(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("a🙂é日b", add_special_tokens=False).ids
    assert not any("\ufffd" in piece for piece in stream(tokenizer, ids))


def test_a_character_left_in_half_is_flushed() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("ok 🙂").ids[:-1]
    pieces = stream(tokenizer, ids)
    assert "".join(pieces[:-1]) == "ok "
    assert pieces[-1] == "\ufffd"


def test_broken_bytes_are_not_held_for_ever() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    broken = tokenizer.token_to_id("ð")
    pieces = stream(tokenizer, [broken] * 20)
    assert all(len("".join(pieces[: n + 1])) >= n - 3 for n in range(20))
    assert "".join(pieces) == "\ufffd" * 20


def test_an_answer_that_begins_inside_a_character() -> None:
    """The prompt's bytes are not repeated, nor completed from the prompt."""
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("🙂 yes").ids[2:]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == "\ufffd yes"


def test_special_tokens_have_no_text() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    end = tokenizer.token_to_id("<|end|>")
    ids = [end, *tokenizer.encode("the").ids, end, *tokenizer.encode(" the").ids, end]
    assert "".join(stream(tokenizer, ids)) == "the the"


def test_a_special_token_does_not_end_a_run_of_bytes() -> None:
    """Decoding skips it, so that the bytes around it decode as one run: here, a broken one."""
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = list(map(tokenizer.token_to_id, ("a", "<0x1C>", "</s>", "<0xD7>", "b")))
    pieces = stream(tokenizer, ids)
    assert pieces == ["a", "", "", "", "\ufffd\ufffdb", ""]
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


def whole(stop: tuple[str, ...], pieces: list[str]) -> tuple[str, bool, list[str]]:
    stops, shown = StopStrings(stop), []
    for piece in pieces:
        text, found = stops.push(piece)
        shown.append(text)
        if found:
            return "".join(shown), True, shown
    return "".join(shown) + stops.finish(), False, shown


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=12),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings_are_found_as_early_as_they_are_complete(
    pieces: list[str], stop: list[str]
) -> None:
    text, found, _ = whole(tuple(stop), pieces)
    read = ""
    for piece in pieces:
        read += piece
        places = [read.find(s) for s in stop if s in read]
        if places:
            assert (text, found) == (read[: min(places)], True)
            return
    assert (text, found) == (read, False)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    _, _, shown = whole(("END",), ["xE", "N", "x", "E", "ND"])
    assert shown == ["x", "", "ENx", "", ""]


def test_deferred_text_equals_streamed_text() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode(TEXTS[3]).ids
    texts = []
    for streamed in (True, False):
        choice = ChoiceText(Detokenizer(tokenizer, frozenset()), (), streamed=streamed)
        for token_id in ids:
            choice.push(token_id)
        choice.finish()
        texts.append(choice.text)
    assert texts[0] == texts[1] == TEXTS[3]


def test_the_last_bytes_may_complete_a_stop_string() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    choice = ChoiceText(Detokenizer(tokenizer, frozenset()), ("\ufffd",), streamed=True)
    for token_id in tokenizer.encode("a🙂").ids[:-1]:
        choice.push(token_id)
    assert choice.finish() == ("", True)
    assert choice.text == "a"
