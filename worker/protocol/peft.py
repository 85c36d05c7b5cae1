"""A PEFT adapter folder, checked without torch: shared by upload and by the worker's loader.

    adapter_config.json          parse_config -> PeftConfig
    adapter_model.safetensors    parse_header -> SafetensorsHeader
    the base model's weights     base_shapes  -> (out, in) by module, (experts, out, in) of fused

`validate` compares the three, `find_not_finite` looks at the values, and `digest` names the
adapter by its content. Formats: PEFT 0.21 `LoraConfig` and `save_pretrained`, safetensors 0.6.
"""

from __future__ import annotations

from worker.protocol.base_shapes import base_shapes
from worker.protocol.peft_blocks import check_blocks, whole
from worker.protocol.peft_config import PeftConfig
from worker.protocol.peft_content import (
    PREFIX,
    Problem,
    adapter_modules,
    adapter_parts,
    adapter_rank,
    digest,
    find_not_finite,
    is_training_state,
    lora_modules,
    rank_of,
    split_key,
)
from worker.protocol.peft_fields import parse_config
from worker.protocol.peft_modules import check_invocation, check_module, refuse_tensor
from worker.protocol.peft_options import AdapterConfigError
from worker.protocol.peft_tables import Shapes, check_tying
from worker.protocol.safetensors_header import (
    SafetensorsError,
    SafetensorsHeader,
    TensorInfo,
    parse_header,
    read_header,
)

__all__ = [
    "CONFIG_FILE",
    "MAX_BYTES",
    "PREFIX",
    "WEIGHTS_FILE",
    "AdapterConfigError",
    "PeftConfig",
    "Problem",
    "SafetensorsError",
    "SafetensorsHeader",
    "Shapes",
    "TensorInfo",
    "adapter_modules",
    "adapter_parts",
    "adapter_rank",
    "base_shapes",
    "digest",
    "find_not_finite",
    "lora_modules",
    "parse_config",
    "parse_header",
    "rank_of",
    "read_header",
    "validate",
]

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
FLOAT_TYPES = ("F32", "F16", "BF16")
MAX_BYTES = 4 << 30


def validate(
    config: PeftConfig, header: SafetensorsHeader, shapes: Shapes, max_bytes: int = MAX_BYTES
) -> list[Problem]:
    """Everything that is wrong with an adapter for the base model of `shapes`.

    `shapes` holds weights by module name (linear ones as out, in), experts' fused weights (as
    experts, out, in), weights stored as (in, out) and biases by their own, and "<head>.tied" of
    an output head that shares the embedding's weight.

    Codes: adapter_invalid_config, adapter_too_large, adapter_unknown_tensor,
    adapter_unsupported_tensor, adapter_incomplete_module, adapter_wrong_dtype,
    adapter_unmatched_modules, adapter_untargeted_module, adapter_rank_mismatch,
    adapter_shape_mismatch.
    """
    problems: list[Problem] = []
    if header.size > max_bytes:
        message = f"{header.size} bytes, at most {max_bytes} are allowed"
        problems.append(Problem("adapter_too_large", WEIGHTS_FILE, message))
    problems += check_invocation(config, shapes)
    for key, tensor in header.tensors.items():
        if split_key(key) is None and not is_training_state(config, key):
            problems.append(refuse_tensor(key))
        if tensor.dtype not in FLOAT_TYPES:
            message = f"{tensor.dtype}, expected one of {', '.join(FLOAT_TYPES)}"
            problems.append(Problem("adapter_wrong_dtype", key, message))
    modules = adapter_parts(config, header)
    if not lora_modules(modules) and not problems:
        problems.append(Problem("adapter_unmatched_modules", WEIGHTS_FILE, "no LoRA tensor at all"))
    problems += check_tying(config, modules, shapes)
    for module, keys in modules.items():
        parts = {part: header.tensors[key].shape for part, key in keys.items()}
        if config.blocks is not None:
            problems += check_blocks(config.blocks, module, parts)
            parts = whole(config.blocks, module, parts)
        problems += check_module(config, module, parts, shapes)
    return problems
