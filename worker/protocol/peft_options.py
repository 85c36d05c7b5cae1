"""Which options of a PEFT 0.21 LoraConfig are served, and which are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class AdapterConfigError(ValueError):
    """A config that is malformed, or asks for something we don't serve.

    `code` is `adapter_invalid_config` or `adapter_unsupported_option`; `param` is the field.
    """

    def __init__(self, code: str, param: str | None, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


def malformed(param: str | None, message: str) -> AdapterConfigError:
    return AdapterConfigError("adapter_invalid_config", param, message)


def unsupported(param: str, message: str) -> AdapterConfigError:
    return AdapterConfigError("adapter_unsupported_option", param, message)


# Value that means "not used", for each option that changes the output and isn't served.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "layer_replication": (None, []),
    "arrow_config": (None,),
    "use_qalora": (None, False),
    "use_bdlora": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
}
# Options that don't go together, and why.
_NO_SUCH = "PEFT computes no such adapter"
_EVERYWHERE = "would change tokens before the invocation, too"
_CLASHES: dict[str, dict[str, str]] = {
    "alora_invocation_tokens": {
        "use_dora": _NO_SUCH,
        "target_parameters": _NO_SUCH,
        "bias": _EVERYWHERE,
        "modules_to_save": _EVERYWHERE,
        "trainable_token_indices": _EVERYWHERE,
    },
    "use_dora": {"lora_bias": _NO_SUCH},
    "target_parameters": {
        "use_dora": _NO_SUCH,
        "lora_bias": _NO_SUCH,
        "fan_in_fan_out": _NO_SUCH,
        "lora_dropout": _NO_SUCH,
    },
}
_UNUSED: tuple[Any, ...] = (None, False, "none", [], {}, "")
# These start from a decomposition of the base model's weights, and change the base.
_BASE_CHANGING_INIT = ("pissa", "olora", "corda", "loftq")
_NO_EFFECT = frozenset(
    {
        "auto_mapping",
        "base_model_class",
        "corda_config",
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
        "alora_invocation_tokens",
        "alpha_pattern",
        "bias",
        "base_model_name_or_path",
        "ensure_weight_tying",
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
        "target_parameters",
        "trainable_token_indices",
        "use_dora",
        "use_rslora",
    }
)


def refuse_unserved(fields: Mapping[str, Any]) -> None:
    """Raises AdapterConfigError for an option, a value or a combination that isn't served."""
    if fields.get("peft_type") != "LORA":
        raise unsupported("peft_type", f"peft_type {fields.get('peft_type')!r}: only LORA")
    for name, unused in _UNSUPPORTED.items():
        if fields.get(name) not in unused:
            raise unsupported(name, f"{name} is not supported")
    for name, others in _CLASHES.items():
        for other, why in others.items():
            if fields.get(name) not in _UNUSED and fields.get(other) not in _UNUSED:
                raise unsupported(name, f"{name} together with {other} is not supported: {why}")
    init = fields.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INIT):
        raise unsupported(
            "init_lora_weights",
            f"init_lora_weights {init!r} changes the base model's weights: convert the adapter "
            "to plain LoRA with save_pretrained(path_initial_model_for_weight_conversion=...)",
        )
    unknown = fields.keys() - _UNSUPPORTED.keys() - _NO_EFFECT - _READ
    used = sorted(name for name in unknown if fields[name] not in _UNUSED)
    if used:
        raise unsupported(used[0], f"{used[0]} is not known, and might change the output")
