"""Adapters that PEFT itself makes, saves and runs: the oracle of ours."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from tests.engine.driver import hf_model
from worker.adapters.loader import load_adapter
from worker.engine.adapter_cache import AdapterCache
from worker.engine.model_loader import ServedModel
from worker.engine.rank_pool import RankPool
from worker.protocol import peft
from worker.protocol.types import AdapterRef

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 8},
    "rslora": {"target_modules": ALL, "r": 8, "lora_alpha": 16, "use_rslora": True},
    "patterns": {
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "r": 4,
        "lora_alpha": 8,
        "use_rslora": True,
        "rank_pattern": {"layers.1.self_attn.q_proj": 7, "down_proj": 2},
        "alpha_pattern": {"v_proj": 32},
    },
    "regex": {"target_modules": r".*layers\.[12]\..*(o_proj|up_proj)", "r": 3},
    "some layers": {"target_modules": ["k_proj"], "layers_to_transform": [1], "r": 5},
    "all-linear": {"target_modules": "all-linear", "exclude_modules": ["down_proj"], "r": 3},
}


def save_adapter(base: Path, folder: Path, seed: int = 5, **config: Any) -> Path:
    """A random adapter of `config`, as PEFT saves it."""
    model = get_peft_model(hf_model(base), LoraConfig(task_type="CAUSAL_LM", **config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            if "lora_magnitude" in name:
                parameter.mul_(1 + noise)
            elif "lora_" in name:
                parameter.copy_(noise)
            elif parameter.requires_grad:  # biases, saved modules, token rows
                parameter.add_(noise)
    model.save_pretrained(folder)
    return folder


def upload_problems(base: Path, folder: Path) -> list[peft.Problem]:
    """What the check at upload, which sees only files, says of an adapter."""
    config = peft.parse_config((folder / peft.CONFIG_FILE).read_bytes())
    header = peft.read_header(folder / peft.WEIGHTS_FILE)
    return peft.validate(config, header, peft.base_shapes(base))


def peft_model(base: Path, adapter: Path) -> torch.nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(hf_model(base), adapter).eval()


def cache(
    model: ServedModel, folders: Mapping[AdapterRef, Path], rank: int, **options: Any
) -> AdapterCache:
    """A cache that loads from `folders`."""
    pool = RankPool(model.linears, rank, model.dtype, model.device, model.others)
    return AdapterCache(pool, lambda ref: load_adapter(folders[ref], model.lora_shapes), **options)


def wait_for_loads(adapters: AdapterCache, seconds: float = 60.0) -> None:
    """After this what runs together depends on the steps alone, not on how long loads take."""
    end = time.monotonic() + seconds
    while any(not resident.ready for resident in adapters._resident.values()):
        assert time.monotonic() < end, "an adapter is still being loaded"
        time.sleep(0.001)
