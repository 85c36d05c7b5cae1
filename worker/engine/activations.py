"""What the widest step needs beside weights and caches, foretold without weights.

The forward pass runs on `meta`, where tensors have sizes and no data, the sampler on a few rows;
`LiveBytes` counts both. What attention and LoRA make inside is added by their shapes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.paged_attention import AttentionPlan
from worker.engine.attention import ForwardContext
from worker.engine.kv_cache import KvLayout
from worker.engine.live_bytes import LiveBytes
from worker.engine.packed_model import PackedModel
from worker.engine.sampler import sample_tokens
from worker.engine.sequence import Sequence
from worker.engine.widest_step import SAMPLING, WidestStep
from worker.protocol.types import RequestId

ROWS = 4
"""Rows that the sampler is tried on."""


def step_activations(
    model: PackedModel, layout: KvLayout, vocabulary: int, step: WidestStep, device_type: str
) -> int:
    """Bytes; `model` lies on `meta`."""
    forward = _forward(model, step) + _inside_lora(model, step)
    if device_type == "cpu":  # elsewhere both are fused
        forward += _inside_attention(model, layout, step)
        row = _sampling_row(vocabulary)
    else:
        row = vocabulary * 3 * 4
    return max(forward, step.sequences * row)


def _forward(model: PackedModel, step: WidestStep) -> int:
    zeros = torch.zeros(step.tokens, dtype=torch.int64, device="meta")
    rows = torch.zeros(step.sequences, dtype=torch.int64, device="meta")
    plan = AttentionPlan.build([1], [1], [[0]], 1)
    with LiveBytes() as live:
        model.forward(zeros, zeros, rows, ForwardContext((plan,), None))
    return int(live.peak)


def _inside_lora(model: PackedModel, step: WidestStep) -> int:
    """Half of the tokens by all rows of the pool, and what that adds to the widest module. The head
    computes the tokens that are sampled from alone."""
    if not step.adapter_rank:
        return 0
    head = model.module.get_output_embeddings() if model.selects_rows else None  # type: ignore[operator]

    def numbers(weight: Tensor) -> int:
        of_head = head is not None and weight is head.weight
        tokens = step.sequences if of_head else step.tokens
        return tokens // 2 * (step.adapter_rank + 2 * max(weight.shape))

    return 4 * max(numbers(weight) for weight in _matrices(model))


def _inside_attention(model: PackedModel, layout: KvLayout, step: WidestStep) -> int:
    """Keys and values of the chunk's context, gathered, and which of them it sees; with soft caps
    or sinks all scores, three times."""
    (before, chunk), *_ = step.spans
    context = before + chunk
    gathered = context * max(layer.values for layer in layout.layers) * layout.dtype.itemsize
    config = model.module.config.get_text_config()  # type: ignore[union-attr, operator]
    capped = getattr(config, "attn_logit_softcapping", None)
    sinks = any(name.endswith("sinks") for name, _ in model.module.named_parameters())
    scores = 3 * 4 * config.num_attention_heads if capped or sinks else 1
    return int(gathered + context * chunk * scores)


def _sampling_row(vocabulary: int) -> int:
    sequences = [
        Sequence(RequestId("row"), 0, (0,), SAMPLING, arrival=row, output_ids=[0])
        for row in range(ROWS)
    ]
    logits = torch.zeros(ROWS, vocabulary)
    with LiveBytes() as live:
        sample_tokens(logits, sequences)
    return int(live.peak + logits.nbytes) // ROWS


def _matrices(model: PackedModel) -> list[Tensor]:
    tables = {id(module.weight) for module in model.module.modules() if _is_table(module)}
    return [
        parameter
        for parameter in model.module.parameters()
        if parameter.ndim == 2 and id(parameter) not in tables
    ]


def _is_table(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Embedding)
