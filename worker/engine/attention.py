"""The attention function that the Hugging Face model calls in every layer.

Keyword arguments of `model(...)` don't reach every architecture's attention, so what a step
knows (blocks, adapters) travels in a context variable instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from kernels.kv_write import kv_write
from kernels.lora import LoraSegments
from kernels.paged_attention import AttentionPlan, paged_attention
from worker.engine.kv_cache import KvCache, LayerKv

ATTENTION = "batten_paged"


class AttentionMismatchError(Exception):
    """A model asks its attention for something that paged attention doesn't do."""


@dataclass(slots=True, eq=False)
class ForwardContext:
    """One forward pass.

    `plans` are those of the cache's groups. Without a `cache`, sequences are whole and nothing is
    kept but the layers' shapes.
    `lora` is over the packed tokens, `head` over those whose logits are computed.
    `layers` lists the layers in the order in which they called their attention.
    """

    plans: tuple[AttentionPlan, ...]
    cache: KvCache | None
    lora: LoraSegments | None = None
    head: LoraSegments | None = None
    layers: list[LayerKv] = field(default_factory=list)


_current: ContextVar[ForwardContext] = ContextVar("forward_context")


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def current_context() -> ForwardContext:
    """The running forward pass. Raises LookupError outside of one."""
    return _current.get()


def in_forward() -> bool:
    """Whether a forward pass runs here."""
    return _current.get(None) is not None


def _attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, tokens, key_dim]
    key: Tensor,  # [1, kv_heads, tokens, key_dim]
    value: Tensor,  # [1, kv_heads, tokens, value_dim]
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """-> [1, tokens, heads, value_dim]"""
    if attention_mask is not None:
        raise AttentionMismatchError("an attention mask of its own")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise AttentionMismatchError("attention that is not causal")
    context = _current.get()
    packed_key, packed_value = key[0].transpose(0, 1), value[0].transpose(0, 1)
    index, window = int(module.layer_idx), sliding_window or None  # type: ignore[arg-type]
    context.layers.append(LayerKv(index, key.shape[1], key.shape[3], value.shape[3], window))
    if context.cache is None:
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    plan = _plan_of(index, window, context.cache, context.plans)
    key_cache, value_cache = context.cache.layer(index)
    kv_write(packed_key, packed_value, key_cache, value_cache, plan)
    out = paged_attention(
        query[0].transpose(0, 1),
        key_cache,
        value_cache,
        plan,
        scale=query.shape[3] ** -0.5 if scaling is None else scaling,
        window=window,
        softcap=softcap or None,
        sinks=s_aux,
    )
    return out.unsqueeze(0), None


def _plan_of(
    layer: int, window: int | None, cache: KvCache, plans: tuple[AttentionPlan, ...]
) -> AttentionPlan:
    group = cache.group(layer)
    kept = cache.layout.groups[group].window
    if kept is not None and (window is None or window > kept):
        raise AttentionMismatchError(f"layer {layer} wants {window} tokens, {kept} are kept")
    return plans[group]


AttentionInterface.register(ATTENTION, _attention)
