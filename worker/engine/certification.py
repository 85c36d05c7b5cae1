"""Whether an architecture gives the same tokens packed as alone, tried before it serves.

Some models ignore the registered attention, carry state from one packed sequence into the next,
or scale positions by the longest sequence in the batch, and none of them raises an error. So a
shrunken copy with random weights is run both ways at start.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from kernels.paged_attention import AttentionPlan
from worker.engine.attention import ForwardContext
from worker.engine.kv_cache import KvCache, KvLayout
from worker.engine.packed_model import PackedModel

BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
LENGTHS = (5, 37, 18)
CHUNKS = ((5, 16, 1), (1, 3, 7), (1, 1, 1))
BLOCK_SIZE = 4
TOLERANCE = 1e-3  # of the largest logit; float32 rounding is near 1e-5

# Sizes of the copy, by the names that configurations use. Only those present are changed.
_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "vocab_size_per_layer_input": 128,
    "hidden_size": 64,
    "hidden_size_per_layer_input": 16,
    "word_embed_proj_dim": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "intermediate_size_mlp": 96,
    "head_dim": 16,
    "global_head_dim": 16,
    "n_inner": 96,
    "rotary_dim": 8,
    "max_position_embeddings": 512,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "expert_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "laurel_rank": 8,
    "num_kv_shared_layers": 1,
    "sliding_window": 8,
    "attention_chunk_size": 8,
}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_HEADS = 4
_LAYERS = 4


class UnsupportedArchitecture(Exception):
    """A model that packed execution would serve wrongly. The message names it and says why."""

    def __init__(self, model_type: str, reason: str) -> None:
        super().__init__(f"unsupported architecture {model_type}: {reason}")
        self.model_type = model_type


def certify(config: PretrainedConfig) -> None:
    """Raises UnsupportedArchitecture unless packed, chunked tokens equal sequences run alone."""
    name = str(config.model_type)
    _check_rope(config)
    try:
        model = _build(shrink(config))
    except Exception as error:  # any class may fail in its own way on sizes it doesn't expect
        raise UnsupportedArchitecture(name, f"no small copy could be built: {error}") from error
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 128, (length,), generator=generator) for length in LENGTHS]
    try:
        with torch.inference_mode():
            alone = [model(input_ids=ids[None], use_cache=False).logits[0] for ids in prompts]
        packed, layers = _run_packed(PackedModel(model), prompts)
    except Exception as error:  # the same: whatever it raises, it can't serve
        raise UnsupportedArchitecture(name, f"{type(error).__name__}: {error}") from error
    _compare(name, alone, packed)
    expected = list(range(shrink(config).num_hidden_layers))
    if layers != expected:
        raise UnsupportedArchitecture(name, f"attention was called for layers {layers}")


def shrink(config: PretrainedConfig) -> PretrainedConfig:
    """A configuration of the same class and features, small enough to run in a second."""
    small = copy.deepcopy(config)
    for name, size in {**_SIZES, **_TOKENS}.items():
        value = vars(small).get(small.attribute_map.get(name, name))
        if value or (name in _TOKENS and value is not None):
            setattr(small, name, [size] * len(value) if isinstance(value, list) else size)
    if hasattr(small, "qk_rope_head_dim"):  # attention's own sizes; this one is derived
        small.head_dim = small.qk_rope_head_dim
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    small.num_attention_heads = _HEADS
    if kv_heads is not None:
        small.num_key_value_heads = {heads: _HEADS, 1: 1}.get(kv_heads, 2)
    _shrink_layers(small)
    small.dtype = torch.float32
    small.quantization_config = None
    return small


def _shrink_layers(config: PretrainedConfig) -> None:
    """Keep four layers, at least one of each kind that the model has."""
    layers = config.num_hidden_layers
    config.num_hidden_layers = min(_LAYERS, layers)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        distinct = list(dict.fromkeys(kinds))[:_LAYERS]
        config.layer_types = (distinct * _LAYERS)[: config.num_hidden_layers]
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == layers:
            setattr(config, name, value[: config.num_hidden_layers])


def _check_rope(config: PretrainedConfig) -> None:
    parameters = getattr(config, "rope_parameters", None) or {}
    per_kind = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in per_kind or [parameters]:
        kind = rope.get("rope_type")
        if kind in BATCH_DEPENDENT_ROPE:
            reason = f"{kind} RoPE depends on the longest sequence in the batch"
            raise UnsupportedArchitecture(str(config.model_type), reason)


def _build(config: PretrainedConfig) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32
        ).eval()
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                torch.nn.init.normal_(parameter, 0, 0.15)
    return model


def _run_packed(model: PackedModel, prompts: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
    """(logits of every prompt, layers whose attention one step called)."""
    layout = model.kv_layout()
    tables = _interleaved_tables(prompts)
    cache = KvCache(_complete(layout), sum(map(len, tables)), BLOCK_SIZE, "cpu")
    done = [0] * len(prompts)
    logits: list[list[Tensor]] = [[] for _ in prompts]
    layers: list[int] = []
    step = 0
    while any(len(ids) > count for ids, count in zip(prompts, done, strict=True)):
        sizes = CHUNKS[min(step, len(CHUNKS) - 1)]
        counts = [
            min(size, len(ids) - start)
            for size, ids, start in zip(sizes, prompts, done, strict=True)
        ]
        busy = [index for index, count in enumerate(counts) if count]
        context = ForwardContext((_plan(busy, counts, done, tables),), cache)
        spans = [(prompts[i], done[i], done[i] + counts[i]) for i in busy]
        ids = torch.cat([prompt[start:stop] for prompt, start, stop in spans])
        positions = torch.cat([torch.arange(start, stop) for _, start, stop in spans])
        out = model.forward(ids, positions, torch.arange(len(ids)), context)
        for index, part in zip(busy, torch.split(out, [counts[i] for i in busy]), strict=True):
            logits[index].append(part)
            done[index] += counts[index]
        layers = [layer.layer for layer in context.layers]
        step += 1
    return [torch.cat(parts) for parts in logits], layers


def _plan(
    busy: list[int], counts: list[int], done: list[int], tables: list[list[int]]
) -> AttentionPlan:
    return AttentionPlan.build(
        [counts[i] for i in busy],
        [done[i] + counts[i] for i in busy],
        [tables[i] for i in busy],
        BLOCK_SIZE,
    )


def _complete(layout: KvLayout) -> KvLayout:
    """All layers in one group: here no block is given up."""
    if not layout.layers:
        raise RuntimeError("it ignores the registered attention")
    return KvLayout.of((replace(layer, window=None) for layer in layout.layers), layout.dtype)


def _interleaved_tables(prompts: Sequence[Tensor]) -> list[list[int]]:
    needed = [-(-len(ids) // BLOCK_SIZE) for ids in prompts]
    blocks = iter(range(sum(needed)))
    tables: list[list[int]] = [[] for _ in prompts]
    for position in range(max(needed)):
        for table, count in zip(tables, needed, strict=True):
            if position < count:
                table.append(next(blocks))
    return tables


def _compare(name: str, alone: Sequence[Tensor], packed: Sequence[Tensor]) -> None:
    scale = max(1.0, max(float(logits.abs().max()) for logits in alone))
    difference = max(
        float((ours - theirs).abs().max()) for ours, theirs in zip(packed, alone, strict=True)
    )
    if not difference <= TOLERANCE * scale:
        reason = f"packed logits differ by {difference:.2g} on a scale of {scale:.2g}"
        raise UnsupportedArchitecture(name, reason)
