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
    "kasa_config": (None,),
}
# Options that don't go together, and why.
_NO_SUCH = "PEFT computes no such adapter"
_EVERYWHERE = "would change tokens before the invocation, too"
_CLASHES: dict[str, dict[str, str]] = {
    "alora_invocation_tokens": {
        "bias": _EVERYWHERE,
        "modules_to_save": _EVERYWHERE,
        "trainable_token_indices": _EVERYWHERE,
    },
    "use_dora": {"lora_bias": _NO_SUCH},
    "use_bdlora": {"lora_bias": "PEFT leaves out the bias of a block-diagonal B"},
    "target_parameters": {
        "lora_bias": _NO_SUCH,
        "fan_in_fan_out": _NO_SUCH,
        "lora_dropout": _NO_SUCH,
    },
}
# Of these an adapter has one, of linear layers only but for DoRA.
_VARIANTS = (
    "use_dora",
    "alora_invocation_tokens",
    "use_bdlora",
    "monteclora_config",
    "velora_config",
    "arrow_config",
    "kasa_config",
)
# State of training, which PEFT saves beside an adapter and doesn't read when it computes.
TRAINING_STATE = {
    "monteclora_config": ".lora_monteclora_sampler.",
    "velora_config": ".lora_velora_embed",
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
        "monteclora_config",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "target_parameters",
        "trainable_token_indices",
        "use_bdlora",
        "use_dora",
        "use_rslora",
        "velora_config",
    }
)


def refuse_unserved(fields: Mapping[str, Any]) -> None:
    """Raises AdapterConfigError for an option, a value or a combination that isn't served."""
    if fields.get("peft_type") != "LORA":
        raise unsupported("peft_type", f"peft_type {fields.get('peft_type')!r}: only LORA")
    for name, unused in _UNSUPPORTED.items():
        if fields.get(name) not in unused:
            raise unsupported(name, f"{name} is not supported")
    used = [name for name in (*_VARIANTS, "target_parameters") if fields.get(name) not in _UNUSED]
    if len(used) > 1:
        message = f"{used[0]} together with {used[1]} is not supported: {_NO_SUCH}"
        raise unsupported(used[0], message)
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
    strange = sorted(name for name in unknown if fields[name] not in _UNUSED)
    if strange:
        raise unsupported(strange[0], f"{strange[0]} is not known, and might change the output")


def variant_of(fields: Mapping[str, Any]) -> str:
    return next((name for name in _VARIANTS if fields.get(name) not in _UNUSED), "")
