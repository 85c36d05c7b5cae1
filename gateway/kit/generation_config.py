"""Sampling defaults that a base model's makers recommend: its `generation_config.json`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import structlog

_log = structlog.get_logger(__name__)

_ALLOWED: Mapping[str, Callable[[float], bool]] = {
    "temperature": lambda value: 0 <= value <= 2,
    "top_p": lambda value: 0 < value <= 1,
    "top_k": lambda value: value >= 0 and value == int(value),
    "min_p": lambda value: 0 <= value <= 1,
    "repetition_penalty": lambda value: value > 0,
}


def sampling_defaults(config: Mapping[str, Any], source: str) -> dict[str, float]:
    """What vLLM's `--generation-config auto` takes from it, but for lengths. `do_sample` is not
    looked at. A value that no request could have is left out, and logged."""
    defaults = {}
    for name, allowed in _ALLOWED.items():
        value = config.get(name)
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and math.isfinite(value) and allowed(value):
            defaults[name] = value
        else:
            _log.warning("generation_config_ignored", source=source, name=name, value=repr(value))
    return defaults
