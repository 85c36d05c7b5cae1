"""Tokens to text while they come: no half characters, no stop strings, the end exact."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from typing import Protocol

REPLACEMENT = "\ufffd"

WINDOW = 8
"""Tokens after which the window moves on: fewer moves cost less than shorter windows save."""


class TextDecoder(Protocol):
    """What is asked of a tokenizer; `tokenizers.Tokenizer` has it."""

    def decode(self, ids: Tokens[int], skip_special_tokens: bool = True) -> str: ...

    def token_to_id(self, token: str) -> int | None: ...


def byte_tokens(tokenizer: TextDecoder) -> frozenset[int]:
    """Ids of the tokens `<0x00>` ... `<0xFF>` of vocabularies with byte fallback."""
    ids = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(token_id for token_id in ids if token_id is not None)


class Detokenizer:
    """The text of one choice, from its generated tokens alone.

    A window of the last tokens is decoded, not the whole answer:

        ids    ........ [start ... read) [read ... end)
        text   released  known text       new text = decode(ids[start:]) without the known text

    The window begins with tokens whose text is known, so that decoders which treat a first
    token differently (leading spaces) do not do so here. What a later token may change is held
    back: a trailing U+FFFD may be the beginning of a character, and a run of byte tokens
    (`<0x..>`) decodes anew as a whole. `finish` decodes everything once and is exact.
    """

    def __init__(self, tokenizer: TextDecoder, byte_tokens: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._byte_tokens = byte_tokens
        self._ids: list[int] = []
        self._start = 0
        self._read = 0
        self._known = ""
        self._length = 0
        self._byte_run = False

    def push(self, token_id: int) -> str:
        """Add one token; returns the text that is certain now."""
        self._ids.append(token_id)
        if token_id in self._byte_tokens:
            self._byte_run = True
        elif self._byte_run:
            # A special token has no text and does not end a run.
            self._byte_run = not self._tokenizer.decode([token_id], skip_special_tokens=True)
        if self._byte_run:
            return ""
        ids, start = self._ids, self._start
        text = self._tokenizer.decode(ids[start:], skip_special_tokens=True)
        if text.endswith(REPLACEMENT):
            return self._release(text[:-1])
        new = self._release(text)
        if new and len(ids) - start > WINDOW:
            self._start = self._read
            self._known = self._tokenizer.decode(ids[self._start :], skip_special_tokens=True)
        self._read = len(ids)
        return new

    def defer(self, token_id: int) -> None:
        """Add one token whose text nobody needs before the end."""
        self._ids.append(token_id)

    def finish(self) -> str:
        """The rest of the text: all that was returned, joined, is the decoding of all tokens."""
        text = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        return text[self._length :]

    def _release(self, text: str) -> str:
        new = text[len(self._known) :]
        if new:
            self._known += new
            self._length += len(new)
        return new


class StopStrings:
    """Finds the first stop string in a growing text and holds back what may become one."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Add text. Returns what is certainly not part of a stop string, and whether one was
        found (then all text before it has been returned)."""
        text = self._held + text
        places = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if places:
            self._held = ""
            return text[: min(places)], True
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """No more text comes: what was held back is text after all."""
        held, self._held = self._held, ""
        return held


class ChoiceText:
    """What one choice says so far. Without stop strings or a reader it is decoded at its end."""

    def __init__(self, detokenizer: Detokenizer, stop: tuple[str, ...], *, streamed: bool) -> None:
        self._detokenizer = detokenizer
        stop = tuple(filter(None, stop))
        self._stop = StopStrings(stop) if stop else None
        self._eager = streamed or bool(stop)
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def push(self, token_id: int) -> tuple[str, bool]:
        """Add one token. Returns the new text, and whether a stop string ends it."""
        if not self._eager:
            self._detokenizer.defer(token_id)
            return "", False
        return self._add(self._detokenizer.push(token_id))

    def finish(self) -> tuple[str, bool]:
        """No more tokens come. As `push`: the last bytes may still complete a stop string."""
        text, stopped = self._add(self._detokenizer.finish())
        if stopped or self._stop is None:
            return text, stopped
        held = self._stop.finish()
        self._parts.append(held)
        return text + held, False

    def _add(self, text: str) -> tuple[str, bool]:
        if not text:
            return "", False
        stopped = False
        if self._stop is not None:
            text, stopped = self._stop.push(text)
        self._parts.append(text)
        return text, stopped


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
