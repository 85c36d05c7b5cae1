"""Bounds on the regular expressions of a stranger's config: `re` has no time limit of its own.

A pattern is priced by the ways in which it can match one name; a pattern that might try more
than MOST_WAYS of them, or whose price isn't known, is refused. PEFT's own patterns cost little:
`.*layers\\.(0|1)\\..*(q|v)_proj` tries every place for two `.*`.
"""

from __future__ import annotations

import re
from re import _parser  # type: ignore[attr-defined]
from typing import Any

MOST_CHARACTERS = 4096
NAME_LENGTH = 64  # of a typical module, where a repeat may end
MOST_WAYS = NAME_LENGTH**3
_ONE_CHARACTER = {"LITERAL", "NOT_LITERAL", "ANY", "IN"}
_NO_WIDTH = {"AT"}
_REPEATS = {"MAX_REPEAT", "MIN_REPEAT"}


def ways(pattern: str) -> int:
    """Upper bound, roughly, of the ways to match a name. Raises re.error or ValueError (why not)"""
    if len(pattern) > MOST_CHARACTERS:
        raise ValueError(f"longer than {MOST_CHARACTERS} characters")
    re.compile(pattern)
    total = _sequence(_parser.parse(pattern))
    if total > MOST_WAYS:
        raise ValueError("it could take too long to match: use fewer repeats and alternatives")
    return total


def _sequence(items: Any) -> int:
    total = 1
    for operation, argument in items:
        total = min(total * _item(str(operation), argument), MOST_WAYS + 1)
    return total


def _item(operation: str, argument: Any) -> int:
    if operation in _ONE_CHARACTER | _NO_WIDTH:
        return 1
    if operation == "SUBPATTERN":
        return _sequence(argument[3])
    if operation == "BRANCH":
        return _branch([list(branch) for branch in argument[1]])
    if operation in _REPEATS:
        low, high, body = argument
        if int(high) <= 1:
            return 1 + _sequence(body)
        if low == high and int(low) <= NAME_LENGTH and _is_one_character(body):
            return 1
        if not _is_one_character(body):
            raise ValueError("it repeats more than a single character")
        return NAME_LENGTH
    raise ValueError(f"it uses {operation.lower()}")


def _is_one_character(body: Any) -> bool:
    items = list(body)
    if len(items) != 1:
        return False
    operation, argument = items[0]
    if str(operation) == "SUBPATTERN":
        return _is_one_character(argument[3])
    return str(operation) in _ONE_CHARACTER


def _branch(branches: list[Any]) -> int:
    """Plain words exclude each other unless one begins another; other branches may all match."""
    words = [_word(branch) for branch in branches]
    plain = [word for word in words if word is not None]
    if len(plain) == len(words):
        return max(sum(other == word[: len(other)] for other in plain) for word in plain)
    return sum(_sequence(branch) for branch in branches)


def _word(branch: list[Any]) -> tuple[int, ...] | None:
    if all(str(operation) == "LITERAL" for operation, _ in branch):
        return tuple(argument for _, argument in branch)
    return None
