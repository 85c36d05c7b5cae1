"""adapter_config.json as PEFT 0.21 writes it: what we serve, and what we refuse by name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from worker.protocol.peft_config import PeftConfig
from worker.protocol.peft_patterns import ways


class AdapterConfigError(ValueError):
    """A config that is malformed, or asks for something we don't serve.

    `code` is `adapter_invalid_config` or `adapter_unsupported_option`; `param` is the field.
    """

    def __init__(self, code: str, param: str | None, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


# Value that means "not used", for each option that changes the output and isn't served.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "layer_replication": (None, []),
    "arrow_config": (None,),
    "use_qalora": (None, False),
    "use_bdlora": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "corda_config": (None,),
    "ensure_weight_tying": (None, False),
}
# These start from a decomposition of the base model's weights, and change the base.
_LARGEST = 3.4028234663852886e38  # float32
_BASE_CHANGING_INIT = ("pissa", "olora", "corda", "loftq")
_NO_EFFECT = frozenset(
    {
        "auto_mapping",
        "base_model_class",
        "eva_config",
        "fan_in_fan_out",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "parent_library",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
        "velora_config",
    }
)
_READ = frozenset(
    {
        "alpha_pattern",
        "bias",
        "base_model_name_or_path",
        "exclude_modules",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_bias",
        "modules_to_save",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "trainable_token_indices",
        "use_dora",
        "use_rslora",
    }
)


def parse_config(data: bytes | str) -> PeftConfig:
    """Raises AdapterConfigError, which names the field."""
    try:
        fields = json.loads(data)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise _malformed(None, f"adapter_config.json is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise _malformed(None, "adapter_config.json is not a JSON object")
    _refuse_unsupported(fields)
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
        modules_to_save=_saved(fields),
        trainable_tokens=_trainable_tokens(fields),
    )


def _bias(fields: Mapping[str, Any]) -> str:
    value = fields.get("bias") or "none"
    if value not in ("none", "all", "lora_only"):
        raise _malformed("bias", f"bias {value!r} is none of none, all, lora_only")
    return str(value)


def _saved(fields: Mapping[str, Any]) -> tuple[str, ...]:
    names = _modules({"modules_to_save": fields.get("modules_to_save")}, "modules_to_save")
    if isinstance(names, str) or "" in (names or ()):
        raise _malformed("modules_to_save", "modules_to_save is not a list of names")
    return names or ()


def _trainable_tokens(
    fields: Mapping[str, Any],
) -> tuple[int, ...] | tuple[tuple[str, tuple[int, ...]], ...]:
    value = fields.get("trainable_token_indices")
    if isinstance(value, dict):
        return tuple((str(name), _token_ids(ids)) for name, ids in value.items())
    return _token_ids(value or [])


def _token_ids(ids: Any) -> tuple[int, ...]:
    name = "trainable_token_indices"
    if not isinstance(ids, list) or not all(type(item) is int and item >= 0 for item in ids):
        raise _malformed(name, f"{name} is not a list of token ids")
    if len(set(ids)) != len(ids):
        raise _malformed(name, f"{name} names a token twice")
    return tuple(ids)


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    if fields.get("peft_type") != "LORA":
        raise _unsupported("peft_type", f"peft_type {fields.get('peft_type')!r}: only LORA")
    for name, unused in _UNSUPPORTED.items():
        if fields.get(name) not in unused:
            raise _unsupported(name, f"{name} is not supported")
    init = fields.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INIT):
        raise _unsupported(
            "init_lora_weights",
            f"init_lora_weights {init!r} changes the base model's weights: convert the adapter "
            "to plain LoRA with save_pretrained(path_initial_model_for_weight_conversion=...)",
        )
    unknown = fields.keys() - _UNSUPPORTED.keys() - _NO_EFFECT - _READ
    used = sorted(name for name in unknown if fields[name] not in (None, False, [], {}, ""))
    if used:
        raise _unsupported(used[0], f"{used[0]} is not known, and might change the output")


def _positive_int(fields: Mapping[str, Any], name: str, default: int | None) -> int:
    value = fields.get(name, default)
    if type(value) is not int or value < 1:
        raise _malformed(name, f"{name} {value!r} is not a positive integer")
    return value


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= _LARGEST:
        raise _malformed(name, f"{name} {value!r} is not a number that fits 32 bits")
    return float(value)


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise _malformed(name, f"{name} {value!r} is neither true nor false")
    return value


def _patterns(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    patterns = fields.get(name) or {}
    if not isinstance(patterns, dict):
        raise _malformed(name, f"{name} is not an object")
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
        raise _malformed(name, f"{name} is neither a string nor a list of strings")
    return tuple(sorted(value))


def _layers(fields: Mapping[str, Any]) -> tuple[int, ...] | None:
    value = fields.get("layers_to_transform")
    layers = [value] if type(value) is int else value
    if layers is None or layers == []:
        return None
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise _malformed("layers_to_transform", "layers_to_transform is not a list of integers")
    return tuple(layers)


def _layers_pattern(fields: Mapping[str, Any]) -> tuple[str, ...]:
    value = fields.get("layers_pattern") or ()
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, list | tuple):
        raise _malformed("layers_pattern", "layers_pattern is neither a string nor a list")
    return tuple(_check_regex("layers_pattern", pattern) for pattern in patterns)


def _check_regex(name: str, pattern: Any) -> str:
    if not isinstance(pattern, str):
        raise _malformed(name, f"{name}: {pattern!r} is not a string")
    try:
        ways(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        message = f"{name}: {pattern[:200]!r} is no regular expression: {error}"
        raise _malformed(name, message) from error
    except ValueError as error:
        raise _unsupported(name, f"{name}: {pattern[:200]!r} is refused: {error}") from error
    return pattern


def _malformed(param: str | None, message: str) -> AdapterConfigError:
    return AdapterConfigError("adapter_invalid_config", param, message)


def _unsupported(param: str, message: str) -> AdapterConfigError:
    return AdapterConfigError("adapter_unsupported_option", param, message)
