"""A served base model with weights, and PEFT folders made for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from gateway.adapters.base_models import register_base_model
from gateway.kit.context import Context

WIDTH = 8
Folder = dict[str, bytes]


@pytest.fixture
def make_folder() -> Callable[..., Folder]:
    """The two files of a LoRA on q_proj of layer 0."""

    def make(rank: int = 2, seed: int = 0, module: str = "q_proj", **config: Any) -> Folder:
        numbers = np.random.default_rng(seed)
        prefix = f"base_model.model.model.layers.0.self_attn.{module}"
        tensors = {
            f"{prefix}.lora_A.weight": numbers.random((rank, WIDTH), np.float32),
            f"{prefix}.lora_B.weight": numbers.random((WIDTH, rank), np.float32),
        }
        fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": [module]}
        return {
            "adapter_config.json": json.dumps(fields | config).encode(),
            "adapter_model.safetensors": save(tensors),
        }

    return make


@pytest.fixture
async def base_model(context: Context, tmp_path: Path) -> str:
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    config = {"model_type": "llama", "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(config))
    weight = np.zeros((WIDTH, WIDTH), np.float32)
    names = [f"model.layers.0.self_attn.{name}.weight" for name in ("q_proj", "v_proj")]
    (folder / "model.safetensors").write_bytes(save(dict.fromkeys(names, weight)))
    async with context.database.write() as session:
        await register_base_model(session, "org/tiny", str(folder))
    return "org/tiny"
