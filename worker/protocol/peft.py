"""A PEFT adapter folder, checked without torch: shared by upload and by the worker's loader.

    adapter_config.json          parse_config -> PeftConfig
    adapter_model.safetensors    parse_header -> SafetensorsHeader
    the base model's weights     base_shapes  -> (out, in) by module

`validate` compares the three, `find_not_finite` looks at the values, and `digest` names the
adapter by its content. Formats: PEFT 0.21 `LoraConfig` and `save_pretrained`, safetensors 0.6.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from worker.protocol.peft_config import PeftConfig
from worker.protocol.peft_content import (
    PREFIX,
    Problem,
    adapter_modules,
    adapter_rank,
    digest,
    find_not_finite,
    split_key,
)
from worker.protocol.peft_fields import AdapterConfigError, parse_config
from worker.protocol.safetensors_header import (
    SafetensorsError,
    SafetensorsHeader,
    TensorInfo,
    parse_header,
    read_header,
)

__all__ = [
    "CONFIG_FILE",
    "PREFIX",
    "WEIGHTS_FILE",
    "AdapterConfigError",
    "PeftConfig",
    "Problem",
    "SafetensorsError",
    "SafetensorsHeader",
    "TensorInfo",
    "adapter_modules",
    "adapter_rank",
    "base_shapes",
    "digest",
    "find_not_finite",
    "parse_config",
    "parse_header",
    "read_header",
    "validate",
]

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
FLOAT_TYPES = ("F32", "F16", "BF16")
MAX_BYTES = 4 << 30
# Models whose linear weights are stored [in, out] (transformers' Conv1D).
CONV1D_MODELS = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer"})

Shapes = Mapping[str, tuple[int, int]]


def validate(
    config: PeftConfig, header: SafetensorsHeader, shapes: Shapes, max_bytes: int = MAX_BYTES
) -> list[Problem]:
    """Everything that is wrong with an adapter for the base model of `shapes` (out, in).

    Codes: adapter_too_large, adapter_unknown_tensor, adapter_unsupported_tensor,
    adapter_incomplete_module, adapter_wrong_dtype, adapter_unmatched_modules,
    adapter_untargeted_module, adapter_rank_mismatch, adapter_shape_mismatch.
    """
    problems: list[Problem] = []
    if header.size > max_bytes:
        message = f"{header.size} bytes, at most {max_bytes} are allowed"
        problems.append(Problem("adapter_too_large", WEIGHTS_FILE, message))
    modules: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for key, tensor in header.tensors.items():
        split = split_key(key)
        if split is None:
            problems.append(_refuse_tensor(key))
        else:
            modules[split[0]][split[1]] = tensor
        if tensor.dtype not in FLOAT_TYPES:
            message = f"{tensor.dtype}, expected one of {', '.join(FLOAT_TYPES)}"
            problems.append(Problem("adapter_wrong_dtype", key, message))
    if not modules and not problems:
        problems.append(Problem("adapter_unmatched_modules", WEIGHTS_FILE, "no LoRA tensor at all"))
    for module, matrices in sorted(modules.items()):
        problems += _check_module(config, module, matrices, shapes)
    return problems


def base_shapes(model_dir: Path) -> dict[str, tuple[int, int]]:
    """(out, in) of every two-dimensional weight of a model folder, by module name.

    Raises SafetensorsError, OSError or ValueError for a folder without readable weights.
    """
    model_type = json.loads((model_dir / "config.json").read_text()).get("model_type")
    shapes: dict[str, tuple[int, int]] = {}
    for path in _weight_files(model_dir):
        for name, tensor in read_header(path).tensors.items():
            if name.endswith(".weight") and len(tensor.shape) == 2:
                rows, columns = tensor.shape
                transposed = model_type in CONV1D_MODELS
                shape = (columns, rows) if transposed else (rows, columns)
                shapes[name.removesuffix(".weight")] = shape
    return shapes


def _weight_files(model_dir: Path) -> list[Path]:
    index = model_dir / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json.loads(index.read_text())["weight_map"]
        return [model_dir / name for name in sorted(set(weight_map.values()))]
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{model_dir} holds no safetensors weights")
    return files


def _refuse_tensor(key: str) -> Problem:
    """A tensor of a PEFT feature we don't serve, or of no PEFT feature at all."""
    if not key.startswith(PREFIX):
        return Problem("adapter_unknown_tensor", key, f"its name doesn't start with {PREFIX}")
    features = {
        "lora_embedding_": "LoRA on embeddings",
        "lora_magnitude_vector": "DoRA",
        "lora_B.bias": "lora_bias",
        "trainable_tokens_delta": "trainable_token_indices",
        "lora_": "this kind of LoRA tensor",
        ".base_layer.": "weights that replace the base model's",
    }
    for part, feature in features.items():
        if part in key:
            return Problem("adapter_unsupported_tensor", key, f"{feature} is not supported")
    return Problem("adapter_unknown_tensor", key, "not a LoRA tensor of this model")


def _check_module(
    config: PeftConfig, module: str, matrices: Mapping[str, TensorInfo], shapes: Shapes
) -> Iterator[Problem]:
    missing = {"A", "B"} - matrices.keys()
    if missing:
        message = f"lora_{missing.pop()}.weight is missing"
        yield Problem("adapter_incomplete_module", module, message)
        return
    if _is_embedding(module):
        message = "LoRA on the output head or the embeddings is not supported"
        yield Problem("adapter_unsupported_tensor", module, message)
        return
    base = _base_shape(module, shapes)
    if base is None:
        yield Problem("adapter_unmatched_modules", module, "the base model has no such module")
        return
    if not config.targets(module):
        message = "target_modules doesn't name it: PEFT would ignore its tensors"
        yield Problem("adapter_untargeted_module", module, message)
    yield from _check_shapes(module, config.rank(module), base, matrices)


def _check_shapes(
    module: str, rank: int, base: tuple[int, int], matrices: Mapping[str, TensorInfo]
) -> Iterator[Problem]:
    a, b = matrices["A"].shape, matrices["B"].shape
    if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
        message = f"A {list(a)} and B {list(b)} don't fit together"
        yield Problem("adapter_shape_mismatch", module, message)
    elif a[0] != rank:
        message = f"rank {a[0]} in the file, {rank} in the config"
        yield Problem("adapter_rank_mismatch", module, message)
    elif (b[0], a[1]) != base:
        message = f"[{b[0]}, {a[1]}], the base model has {list(base)}"
        yield Problem("adapter_shape_mismatch", module, message)


def _base_shape(module: str, shapes: Shapes) -> tuple[int, int] | None:
    """Checkpoints of a bare model (GPT-2's, for one) leave out the first part of names."""
    return shapes.get(module) or shapes.get(module.partition(".")[2])


def _is_embedding(module: str) -> bool:
    name = module.rpartition(".")[2]
    return name in {"lm_head", "embed_out", "output"} or "embed" in name or name in {"wte", "wpe"}
