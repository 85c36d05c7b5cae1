"""The values of an adapter_config.json as PEFT 0.21 writes it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from worker.protocol.peft_config import BlockDiagonal, PeftConfig
from worker.protocol.peft_options import malformed, refuse_unserved, unsupported, variant_of
from worker.protocol.peft_patterns import ways

_LARGEST = 3.4028234663852886e38  # float32


def parse_config(data: bytes | str) -> PeftConfig:
    """Raises AdapterConfigError, which names the field."""
    try:
        fields = json.loads(data)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise malformed(None, f"adapter_config.json is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise malformed(None, "adapter_config.json is not a JSON object")
    refuse_unserved(fields)
    return PeftConfig(
        r=_positive_int(fields, "r", 8),
        lora_alpha=_number("lora_alpha", fields.get("lora_alpha", 8)),
        use_rslora=_flag(fields, "use_rslora"),
        rank_pattern=tuple(
            (pattern, _positive_int({"rank_pattern": rank}, "rank_pattern", None))
            for pattern, rank in _patterns(fields, "rank_pattern").items()
        ),
        alpha_pattern=tuple(
            (pattern, _number("alpha_pattern", alpha))
            for pattern, alpha in _patterns(fields, "alpha_pattern").items()
        ),
        target_modules=_modules(fields, "target_modules"),
        exclude_modules=_modules(fields, "exclude_modules"),
        layers_to_transform=_layers(fields),
        layers_pattern=_layers_pattern(fields),
        base_model=fields.get("base_model_name_or_path"),
        use_dora=_flag(fields, "use_dora"),
        lora_bias=_flag(fields, "lora_bias"),
        bias=_bias(fields),
        modules_to_save=_names(fields, "modules_to_save"),
        trainable_tokens=_trainable_tokens(fields),
        target_parameters=_names(fields, "target_parameters"),
        variant=variant_of(fields),
        blocks=_blocks(fields),
        ensure_weight_tying=_flag(fields, "ensure_weight_tying"),
        invocation=_token_ids(fields, "alora_invocation_tokens"),
    )


def _bias(fields: Mapping[str, Any]) -> str:
    value = fields.get("bias") or "none"
    if value not in ("none", "all", "lora_only"):
        raise malformed("bias", f"bias {value!r} is none of none, all, lora_only")
    return str(value)


def _names(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    names = _modules(fields, name)
    if isinstance(names, str) or "" in (names or ()):
        raise malformed(name, f"{name} is not a list of names")
    return names or ()


def _trainable_tokens(
    fields: Mapping[str, Any],
) -> tuple[int, ...] | tuple[tuple[str, tuple[int, ...]], ...]:
    name = "trainable_token_indices"
    value = fields.get(name)
    if isinstance(value, dict):
        return tuple((str(module), _distinct({name: ids}, name)) for module, ids in value.items())
    return _distinct(fields, name)


def _distinct(fields: Mapping[str, Any], name: str) -> tuple[int, ...]:
    ids = _token_ids(fields, name)
    if len(set(ids)) != len(ids):
        raise malformed(name, f"{name} names a token twice")
    return ids


def _token_ids(fields: Mapping[str, Any], name: str) -> tuple[int, ...]:
    ids = fields.get(name) or []
    if not isinstance(ids, list) or not all(type(item) is int and item >= 0 for item in ids):
        raise malformed(name, f"{name} is not a list of token ids")
    return tuple(ids)


def _blocks(fields: Mapping[str, Any]) -> BlockDiagonal | None:
    value = fields.get("use_bdlora")
    if not value:
        return None
    if not isinstance(value, dict):
        raise malformed("use_bdlora", "use_bdlora is not an object")
    return BlockDiagonal(
        _positive_int(value, "nblocks", 1),
        _names(value, "target_modules_bd_a"),
        _names(value, "target_modules_bd_b"),
        _flag({"match_strict": value.get("match_strict", True)}, "match_strict"),
    )


def _positive_int(fields: Mapping[str, Any], name: str, default: int | None) -> int:
    value = fields.get(name, default)
    if type(value) is not int or value < 1:
        raise malformed(name, f"{name} {value!r} is not a positive integer")
    return value


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= _LARGEST:
        raise malformed(name, f"{name} {value!r} is not a number that fits 32 bits")
    return float(value)


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise malformed(name, f"{name} {value!r} is neither true nor false")
    return value


def _patterns(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    patterns = fields.get(name) or {}
    if not isinstance(patterns, dict):
        raise malformed(name, f"{name} is not an object")
    for pattern in patterns:
        _check_regex(name, pattern)
    return patterns


def _modules(fields: Mapping[str, Any], name: str) -> str | tuple[str, ...] | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, str):
        return _check_regex(name, value)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise malformed(name, f"{name} is neither a string nor a list of strings")
    return tuple(sorted(value))


def _layers(fields: Mapping[str, Any]) -> tuple[int, ...] | None:
    value = fields.get("layers_to_transform")
    layers = [value] if type(value) is int else value
    if layers is None or layers == []:
        return None
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise malformed("layers_to_transform", "layers_to_transform is not a list of integers")
    return tuple(layers)


def _layers_pattern(fields: Mapping[str, Any]) -> tuple[str, ...]:
    value = fields.get("layers_pattern") or ()
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, list | tuple):
        raise malformed("layers_pattern", "layers_pattern is neither a string nor a list")
    return tuple(_check_regex("layers_pattern", pattern) for pattern in patterns)


def _check_regex(name: str, pattern: Any) -> str:
    if not isinstance(pattern, str):
        raise malformed(name, f"{name}: {pattern!r} is not a string")
    try:
        ways(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        message = f"{name}: {pattern[:200]!r} is no regular expression: {error}"
        raise malformed(name, message) from error
    except ValueError as error:
        raise unsupported(name, f"{name}: {pattern[:200]!r} is refused: {error}") from error
    return pattern
