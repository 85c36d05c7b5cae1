"""A model's sizes from its config.json alone: its modules are built on no device, without data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from worker.engine.activations import step_activations
from worker.engine.kv_cache import KvLayout
from worker.engine.lora import wrap_linears
from worker.engine.packed_linear import packable
from worker.engine.packed_model import PackedModel
from worker.engine.rank_pool import RankPool
from worker.engine.sizing import ModelSize
from worker.engine.widest_step import WidestStep


def model_size(
    folder: Path,
    dtype: torch.dtype,
    *,
    token_budget: int = 512,
    max_sequences: int = 256,
    adapter_rank: int = 256,
    device_type: str = "cpu",
) -> ModelSize:
    """Raises OSError, ValueError or KeyError for a folder without a config that can be read."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    text = config.get_text_config()
    packed, context = PackedModel(model), int(text.max_position_embeddings)
    layout = packed.kv_layout(context)
    step = WidestStep.on(
        device_type,
        token_budget=token_budget,
        max_sequences=max_sequences,
        context_tokens=context,
        adapter_rank=adapter_rank,
    )
    activations = step_activations(packed, layout, text.vocab_size, step, device_type)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    copied = packable(model) if device_type == "cpu" else []
    return ModelSize(
        parameters=parameters,
        active_parameters=_active(model, text),
        weights=sum(parameter.nbytes for parameter in model.parameters()),
        packable=sum(linear.weight.nbytes for linear in copied),
        kv_token=layout.bytes_per_token,
        kv_slot=layout.bytes_per_slot,
        windows=layout.windows,
        adapter_rank=RankPool.bytes_per_rank(wrap_linears(model), dtype),
        activations=activations,
        attention_flops=_attention_flops(layout, text),
        context_tokens=context,
    )


def _active(model: nn.Module, text: Any) -> int:
    """Parameters that the matrix products of one token read: of experts, the chosen share."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    total = sum(
        parameter.numel() * _share(name, text)
        for name, parameter in model.named_parameters()
        if id(parameter) not in tables and parameter is not head.weight
    )
    return int(total) + int(head.weight.numel())


def _share(name: str, text: Any) -> float:
    if ".experts." not in name:
        return 1.0
    names = ("num_local_experts", "n_routed_experts", "num_experts")
    experts = next((getattr(text, key) for key in names if getattr(text, key, None)), 1)
    return float(getattr(text, "num_experts_per_tok", experts)) / float(experts)


def _attention_flops(layout: KvLayout, text: Any) -> int:
    """Scores and their sum over values: two products for every query head and layer."""
    return sum(
        2 * text.num_attention_heads * (layer.key_dim + layer.value_dim) for layer in layout.layers
    )
