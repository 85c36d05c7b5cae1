"""What an adapter's tensors are: which modules they belong to, whether they are numbers, and
the digest that names them."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from worker.protocol.peft_config import PeftConfig
from worker.protocol.peft_options import TRAINING_STATE
from worker.protocol.safetensors_header import SafetensorsHeader, TensorInfo

PREFIX = "base_model.model."
# Parts of a module, by the ends of keys; the longest end is tried first.
_PARTS = {
    "lora_A.weight": "A",
    "lora_B.weight": "B",
    "lora_B.bias": "lora_bias",
    "lora_magnitude_vector": "magnitude",
    "lora_embedding_A": "embedding_A",
    "lora_embedding_B": "embedding_B",
    "token_adapter.trainable_tokens_delta": "token_rows",
    "base_layer.weight": "base_copy",
    "base_layer.bias": "bias",
    "modules_to_save.bias": "unused",
    "original_module.bias": "unused",
    "weight": "weight",
    "bias": "bias",
}
_UNUSED = "unused"  # what PEFT writes a second time with `bias`, and does not read
_EXPONENT = {
    "F32": (np.uint32, 0x7F800000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}
_CHUNK = 1 << 24


@dataclass(frozen=True, slots=True)
class Problem:
    """Why an adapter is refused. `name` is the module, tensor or field it is about."""

    code: str
    name: str
    message: str


def split_key(key: str) -> tuple[str, str] | None:
    """("model.layers.0.self_attn.q_proj", "A") of a tensor's key. Parts: see _PARTS."""
    if not key.startswith(PREFIX):
        return None
    for suffix, part in _PARTS.items():
        if key.endswith(f".{suffix}"):
            module = key.removeprefix(PREFIX).removesuffix(f".{suffix}")
            known = "lora_" not in module and "base_layer" not in _unwrapped(module)
            return (module, part) if known else None
    return None


def is_training_state(config: PeftConfig, key: str) -> bool:
    state = TRAINING_STATE.get(config.variant)
    return state is not None and key.startswith(PREFIX) and state in key


def _unwrapped(module: str) -> str:
    """Without the levels of a module of which several parameters are adapted."""
    while module.endswith(".base_layer"):
        module = module.removesuffix(".base_layer")
    return module


def adapter_parts(config: PeftConfig, header: SafetensorsHeader) -> dict[str, dict[str, str]]:
    """{module: {part: key}} of all tensors that belong to a module, or to a parameter of one
    ("model.layers.0.mlp.experts.down_proj") that isn't its `weight`."""
    parts: dict[str, dict[str, str]] = {}
    for key in sorted(header.tensors):
        split = split_key(key)
        if split is not None and split[1] != _UNUSED:
            parts.setdefault(split[0], {})[split[1]] = key
    names = _parameter_names(config, parts)
    return {names.get(module, module): keys for module, keys in parts.items()}


def _parameter_names(config: PeftConfig, modules: Iterable[str]) -> dict[str, str]:
    """PEFT saves a module's adapted parameters without their names: the last one as the
    module's LoRA, the one before as that of its `base_layer`, and so on."""
    levels: defaultdict[str, list[str]] = defaultdict(list)
    for module in sorted(modules, key=len, reverse=True):
        levels[_unwrapped(module)].append(module)
    names: dict[str, str] = {}
    for module, wrapped in levels.items():
        parameters = config.parameters(module)
        if len(parameters) == len(wrapped) and parameters != ("weight",):
            targets = (f"{module}.{parameter}" for parameter in parameters)
            names |= zip(wrapped, targets, strict=True)
    return names


def adapter_modules(config: PeftConfig, header: SafetensorsHeader) -> tuple[str, ...]:
    """Names of the modules that the file adds LoRA to, sorted."""
    return lora_modules(adapter_parts(config, header))


def lora_modules(parts: Mapping[str, Mapping[str, str]]) -> tuple[str, ...]:
    """As `adapter_modules`, of parts that are known already."""
    matrices = {"A", "B", "embedding_A", "embedding_B"}
    return tuple(sorted(module for module, keys in parts.items() if matrices & keys.keys()))


def adapter_rank(config: PeftConfig, header: SafetensorsHeader) -> int:
    """The largest rank of any module: the rows it takes in a rank pool. Experts' don't lie in
    the pool, but every adapter has a row."""
    return rank_of(config, adapter_modules(config, header))


def rank_of(config: PeftConfig, modules: Sequence[str]) -> int:
    """As `adapter_rank`, of the modules that LoRA is added to."""
    ranks = [config.rank(module) for module in modules if not config.targets_parameter(module)]
    return max(ranks, default=min(1, len(modules)))


def digest(config: PeftConfig, header: SafetensorsHeader, data: bytes | memoryview) -> str:
    """sha256 (hex) of what an adapter computes. `data` is its whole safetensors file.

    The config counts by its effects (each module's rank and scale), tensors by name, dtype,
    shape and bytes in sorted order: neither key order nor file layout nor metadata changes it.
    """
    view = memoryview(data)
    effects = {
        module: [config.rank(module), config.scale(module).hex()]
        for module in adapter_modules(config, header)
    }
    content = hashlib.sha256(b"batten-lora-1\n")
    content.update(json.dumps(effects, sort_keys=True).encode())
    if config.trainable_tokens:
        content.update(json.dumps(config.trainable_tokens).encode())
    if config.blocks is not None:
        blocks = {module: config.blocks.of(module) for module in effects}
        content.update(json.dumps({"blocks": blocks}, sort_keys=True).encode())
    if config.invocation:
        content.update(json.dumps({"invocation": config.invocation}).encode())
    for name, tensor in sorted(header.tensors.items()):
        content.update(json.dumps([name, tensor.dtype, list(tensor.shape)]).encode())
        content.update(view[tensor.start : tensor.stop])
    return content.hexdigest()


def find_not_finite(header: SafetensorsHeader, data: bytes | memoryview) -> list[Problem]:
    """An `adapter_not_finite` problem for each tensor that holds NaN or infinity."""
    view = memoryview(data)
    return [
        Problem("adapter_not_finite", name, "holds NaN or infinity")
        for name, tensor in sorted(header.tensors.items())
        if tensor.dtype in _EXPONENT and not _is_finite(view[tensor.start : tensor.stop], tensor)
    ]


def _is_finite(data: memoryview, tensor: TensorInfo) -> bool:
    kind, exponent = _EXPONENT[tensor.dtype]
    values = np.frombuffer(data, dtype=kind)
    chunks = (values[start : start + _CHUNK] for start in range(0, len(values), _CHUNK))
    return not any(bool(((chunk & exponent) == exponent).any()) for chunk in chunks)
