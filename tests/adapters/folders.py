"""Adapter folders written without PEFT, to be right or wrong in one place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save, save_file

from worker.protocol import peft

SHAPES = {
    f"model.layers.{layer}.{module}": shape
    for layer in range(2)
    for module, shape in {
        "self_attn.q_proj": (16, 12),
        "self_attn.v_proj": (8, 12),
        "mlp.down_proj": (12, 20),
    }.items()
}
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "base_model_name_or_path": "base",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj"],
    "bias": "none",
}
MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj")


def tensors(modules: Any = MODULES, rank: int = 4, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for module in modules:
        out, width = SHAPES[module]
        key = f"base_model.model.{module}"
        result[f"{key}.lora_A.weight"] = torch.randn(rank, width, generator=generator)
        result[f"{key}.lora_B.weight"] = torch.randn(out, rank, generator=generator)
    return result


def check(weights: dict[str, torch.Tensor], **fields: Any) -> list[peft.Problem]:
    """Problems of an adapter for SHAPES."""
    config = peft.parse_config(json.dumps({**CONFIG, **fields}))
    return peft.validate(config, peft.parse_header(save(weights)), SHAPES)


def write(folder: Path, weights: dict[str, torch.Tensor] | None = None, **fields: Any) -> str:
    """Write an adapter and return its digest."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**CONFIG, **fields})
    (folder / peft.CONFIG_FILE).write_text(text)
    save_file(tensors() if weights is None else weights, folder / peft.WEIGHTS_FILE)
    data = (folder / peft.WEIGHTS_FILE).read_bytes()
    return peft.digest(peft.parse_config(text), peft.parse_header(data), data)
