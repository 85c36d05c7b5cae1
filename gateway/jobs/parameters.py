"""Sampling parameters of a body, checked one by one: honoured, harmless, or refused by name.

A parameter that would change the output and is not honoured is an error, never dropped.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.errors import BadRequest

Body = Mapping[str, Any]

MAX_SEED = 2**63 - 1
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20

_HARMLESS = frozenset(
    {
        "metadata",
        "model",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "user",
    }
)
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}


@dataclass(frozen=True, slots=True)
class Range:
    low: float
    high: float
    above_low: bool = False

    def holds(self, value: float) -> bool:
        return (self.low < value if self.above_low else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        low = "above" if self.above_low else "at least"
        high = "" if math.isinf(self.high) else f" and at most {self.high:g}"
        return f"{low} {self.low:g}{high}"


FLOATS: Mapping[str, tuple[float, Range]] = {
    "temperature": (1.0, Range(0, 2)),
    "top_p": (1.0, Range(0, 1, above_low=True)),
    "min_p": (0.0, Range(0, 1)),
    "presence_penalty": (0.0, Range(-2, 2)),
    "frequency_penalty": (0.0, Range(-2, 2)),
    "repetition_penalty": (1.0, Range(0, math.inf, above_low=True)),
}


def refuse_unsupported(body: Body, honoured: Collection[str]) -> None:
    """Raises BadRequest for the first parameter that is neither honoured nor harmless."""
    for name, value in body.items():
        if value is None or name in honoured or name in _HARMLESS:
            continue
        if value not in _NEUTRAL.get(name, ()):
            raise BadRequest(
                f"Unsupported parameter: '{name}' is not supported.",
                code="unsupported_parameter",
                param=name,
            )


def number(body: Body, name: str, defaults: Mapping[str, float]) -> float:
    """`defaults` are the model's own. Raises BadRequest."""
    neutral, allowed = FLOATS[name]
    value = body.get(name)
    if value is None:
        return float(defaults.get(name, neutral))
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(name, "a number")
    try:
        converted = float(value)
    except OverflowError:
        raise wrong_value(name, f"must be {allowed}") from None
    if not math.isfinite(converted) or not allowed.holds(converted):
        raise wrong_value(name, f"must be {allowed}")
    return converted


def integer(body: Body, name: str, low: int, high: int) -> int | None:
    """Raises BadRequest."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(name, "an integer")
    if not low <= value <= high:
        raise wrong_value(name, f"must be between {low} and {high}")
    return value


def boolean(body: Body, name: str) -> bool:
    """Raises BadRequest."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise wrong_type(name, "a boolean")
    return bool(value)


def top_k(body: Body, defaults: Mapping[str, float]) -> int:
    """0 and -1 both mean all tokens. `defaults` are the model's own. Raises BadRequest."""
    value = integer(body, "top_k", -1, 2**31 - 1)
    return int(defaults.get("top_k", 0)) if value is None else max(value, 0)


def stops(body: Body) -> tuple[str, ...]:
    """Raises BadRequest."""
    value = body.get("stop")
    if value is None:
        return ()
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        raise wrong_type("stop", "a string or an array of strings")
    if len(values) > MAX_STOPS or not all(values):
        raise wrong_value("stop", f"must be at most {MAX_STOPS} non-empty strings")
    return tuple(dict.fromkeys(values))


def logit_bias(body: Body, vocabulary: int) -> tuple[tuple[int, float], ...]:
    """Token ids and what is added to their logits. Raises BadRequest."""
    value = body.get("logit_bias")
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise wrong_type("logit_bias", "an object")
    return tuple(sorted(_bias(key, bias, vocabulary) for key, bias in value.items()))


def _bias(key: str, bias: Any, vocabulary: int) -> tuple[int, float]:
    param = f"logit_bias.{key}"
    if not (key.isascii() and key.isdigit()) or len(key) > 10 or int(key) >= vocabulary:
        raise wrong_value(param, "its name must be a token id of the model")
    if isinstance(bias, bool) or not isinstance(bias, int | float):
        raise wrong_type(param, "a number")
    if not -100 <= bias <= 100:
        raise wrong_value(param, "must be between -100 and 100")
    return int(key), float(bias)


def wrong_type(name: str, expected: str) -> BadRequest:
    return BadRequest(
        f"Invalid type for '{name}': expected {expected}.", code="invalid_type", param=name
    )


def wrong_value(name: str, why: str) -> BadRequest:
    return BadRequest(f"Invalid value for '{name}': {why}.", code="invalid_value", param=name)


def missing(name: str) -> BadRequest:
    return BadRequest(
        f"Missing required parameter: '{name}'.", code="missing_required_parameter", param=name
    )
