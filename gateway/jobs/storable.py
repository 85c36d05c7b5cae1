"""What of a client's JSON can be stored: metadata of OpenAI's size, text without NUL."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator

from gateway.jobs.parameters import wrong_value

MAX_PAIRS = 16
MAX_KEY = 64
MAX_VALUE = 512


def _check_metadata(metadata: dict[str, str]) -> dict[str, str]:
    if len(metadata) > MAX_PAIRS:
        raise ValueError(f"at most {MAX_PAIRS} pairs")
    for key, value in metadata.items():
        if len(key) > MAX_KEY:
            raise ValueError(f"keys have at most {MAX_KEY} characters")
        if len(value) > MAX_VALUE:
            raise ValueError(f"values have at most {MAX_VALUE} characters")
        if has_nul(key) or has_nul(value):
            raise ValueError("NUL characters cannot be stored")
    return metadata


Metadata = Annotated[dict[str, str], AfterValidator(_check_metadata)]


def has_nul(value: Any) -> bool:
    """Whether any string in a JSON value holds U+0000, which Postgres cannot keep."""
    match value:
        case str():
            return "\0" in value
        case list():
            return any(has_nul(each) for each in value)
        case dict():
            return any(has_nul(key) or has_nul(each) for key, each in value.items())
        case _:
            return False


def refuse_nul(value: Any, param: str) -> None:
    """Raises BadRequest."""
    if has_nul(value):
        raise wrong_value(param, "NUL characters (U+0000) cannot be stored")
