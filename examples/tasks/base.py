"""What the three tasks share: the example type, the split, text noise, strict JSON scoring."""

import json
import random
import string
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

HELD_OUT_SEED = 20_000
_HELD_OUT_SHARE = 5
_ATTEMPTS_PER_EXAMPLE = 200

T = TypeVar("T")
Message = dict[str, str]


@dataclass(frozen=True)
class Example:
    """One request's user text and the answer wanted for it."""

    user: str
    answer: str


class Task(Protocol):
    """The interface of a task module."""

    NAME: str
    SYSTEM: str
    MAX_TOKENS: int

    def messages(self, user: str) -> list[Message]: ...

    def generate(self, n: int, seed: int, *, heldout: bool = False) -> list[Example]: ...

    def score(self, text: str, answer: str) -> bool: ...


def chat(system: str, user: str) -> list[Message]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def is_held_out(*wording: object) -> bool:
    """Which side of the split a combination of wordings belongs to."""
    return zlib.crc32(repr(wording).encode()) % _HELD_OUT_SHARE == 0


def side(values: Sequence[T], heldout: bool) -> Sequence[T]:
    """The part of a vocabulary that one side of the split may use: every fourth is held out."""
    return [value for index, value in enumerate(values) if (index % 4 == 3) == heldout]


def number(rng: random.Random, low: int, high: int, heldout: bool) -> int:
    """A number in [low, high); the held-out side draws multiples of 7, training all others."""
    while True:
        value = rng.randrange(low, high)
        if (value % 7 == 0) == heldout:
            return value


def distinct(n: int, seed: int, make: Callable[[random.Random], Example | None]) -> list[Example]:
    """n examples with different user texts; ``make`` returns None to try another draw."""
    rng = random.Random(seed)
    found: dict[str, Example] = {}
    for _ in range(n * _ATTEMPTS_PER_EXAMPLE):
        if len(found) == n:
            return list(found.values())
        example = make(rng)
        if example is not None:
            found.setdefault(example.user, example)
    if len(found) == n:
        return list(found.values())
    raise ValueError(f"could not draw {n} distinct examples, only {len(found)}")


def noisy(text: str, rng: random.Random, keep: Sequence[str]) -> str:
    """``text`` with now and then a typo or a change of case, outside the strings in ``keep``."""
    protected = {word for value in keep for word in value.lower().split()}
    words = text.split(" ")
    if rng.random() < 0.3:
        plain = [i for i, word in enumerate(words) if _is_plain(word, protected)]
        if plain:
            index = rng.choice(plain)
            words[index] = _typo(words[index], rng)
    if rng.random() < 0.15:
        words = [w if _stem(w) in protected else w.lower() for w in words]
    return " ".join(words)


def _stem(word: str) -> str:
    return word.strip(string.punctuation).lower()


def _is_plain(word: str, protected: set[str]) -> bool:
    return len(word) > 4 and word.isalpha() and word.lower() not in protected


def _typo(word: str, rng: random.Random) -> str:
    at = rng.randrange(1, len(word) - 2)
    if rng.random() < 0.5:
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    return word[:at] + word[at + 1 :]


def dump(fields: dict[str, Any]) -> str:
    return json.dumps(fields, ensure_ascii=False)


def same_json(text: str, answer: str) -> bool:
    """Whether ``text`` is one strict JSON value with exactly the fields of ``answer``.

    The order of keys does not matter. Types do: 20, 20.0 and "20" all differ.
    """
    try:
        found = json.loads(text, parse_constant=_refuse, object_pairs_hook=_no_repeats)
    except (ValueError, RecursionError):
        return False
    return _canonical(found) == _canonical(json.loads(answer))


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("repeated key")
    return fields
