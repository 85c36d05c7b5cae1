"""An unmodified Hugging Face causal language model, run on packed tokens."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn

from kernels.paged_attention import AttentionPlan
from worker.engine.attention import ATTENTION, ForwardContext, forward_context
from worker.engine.kv_cache import KvLayout, LayerKv


class PackedModel:
    """Takes over `model`'s attention; sequences are laid end to end as [1, tokens]."""

    def __init__(self, model: nn.Module) -> None:
        self.module = model.eval()
        self.module.set_attn_implementation(ATTENTION)  # type: ignore[operator]
        self.selects_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, positions: Tensor, rows: Tensor, context: ForwardContext
    ) -> Tensor:
        """Logits, float32 [rows, vocabulary], after the packed tokens that `rows` selects.

        `token_ids`, `positions` and `rows` are int64 vectors on the model's device.
        """
        options = {"logits_to_keep": rows} if self.selects_rows else {}
        with forward_context(context):
            output = self.module(
                input_ids=token_ids[None],
                position_ids=positions[None],
                attention_mask=None,
                use_cache=False,
                **options,
            )
        logits: Tensor = output.logits[0]
        return (logits if self.selects_rows else logits[rows]).float()

    def kv_layout(self, context_tokens: int | None = None) -> KvLayout:
        """What each layer stores and sees, as it shows in a forward pass over one token."""
        layers: dict[int, LayerKv] = {layer.layer: layer for layer in self.trace_layers()}
        dtype = next(self.module.parameters()).dtype
        return KvLayout.of((layers[index] for index in sorted(layers)), dtype, context_tokens)

    def trace_layers(self) -> list[LayerKv]:
        """The layers whose attention one forward pass calls, in order."""
        device = self.device
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        plan = AttentionPlan.build([1], [1], [[0]], 1, device)
        context = ForwardContext((plan,), None)
        self.forward(zero, zero, zero, context)
        return context.layers
