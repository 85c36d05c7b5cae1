"""Strict JSON (RFC 8259): no NaN or Infinity, no lone surrogates, no number beyond a double."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from gateway.errors import BadRequest

MAX_DEPTH = 100
"""Deepest nesting: far beyond any use, and what recursion over a value can follow."""


class InvalidJson(ValueError):
    """Says what is wrong, for a person who sent the text."""


def parse_json(text: bytes) -> Any:
    """Raises InvalidJson."""
    try:
        value = msgspec.json.decode(text)
    except RecursionError:
        raise InvalidJson("it is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidJson(_reason(text, str(error))) from None
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH and _is_deep(value):
        raise InvalidJson("it is nested too deeply")
    return value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, list | dict)
        ]
    return bool(level)


def check_json(body: bytes) -> None:
    """Raises BadRequest."""
    try:
        parse_json(body)
    except InvalidJson as error:
        raise BadRequest(
            f"We could not parse the JSON body of your request: {error}.", code="invalid_json"
        ) from None


def _reason(text: bytes, message: str) -> str:
    if b"NaN" in text or b"Infinity" in text:
        return f"{message}; NaN and Infinity are not JSON"
    return message.removeprefix("JSON is malformed: ")


def storable(value: Any) -> Any:
    """A JSON value that any database keeps: NUL and lone surrogates escaped, numbers that are
    not finite null."""
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
        case float() if not math.isfinite(value):
            return None
        case list():
            return [storable(each) for each in value]
        case dict():
            return {storable(key): storable(each) for key, each in value.items()}
        case _:
            return value
