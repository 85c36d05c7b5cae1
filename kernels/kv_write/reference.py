"""The definition in torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from kernels.paged_attention import AttentionPlan


def kv_write(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan
) -> None:
    """See `kernels.kv_write.kv_write`."""
    _, kv_heads, _, key_dim = key_cache.shape
    rows = _rows(plan, kv_heads)
    key_cache.view(-1, key_dim).index_copy_(0, rows, key.reshape(-1, key_dim))
    value_dim = value_cache.shape[3]
    value_cache.view(-1, value_dim).index_copy_(0, rows, value.reshape(-1, value_dim))


def _rows(plan: AttentionPlan, kv_heads: int) -> Tensor:
    """int64 [tokens * kv_heads]: rows of a cache seen as [blocks * kv_heads * block_size, dim]."""
    derived = ("rows", kv_heads)
    if derived not in plan.derived:
        size = plan.block_size
        heads = torch.arange(kv_heads, device=plan.slots.device)
        blocks, offsets = plan.slots // size, plan.slots % size
        rows = (blocks[:, None] * kv_heads + heads) * size + offsets[:, None]
        plan.derived[derived] = rows.reshape(-1)
    return cast(Tensor, plan.derived[derived])


def copy_blocks(caches: Sequence[Tensor], copies: Sequence[tuple[int, int]]) -> None:
    """See `kernels.kv_write.copy_blocks`."""
    if not caches or not copies:
        return
    sources, targets = torch.tensor(copies, device=caches[0].device).unbind(1)
    for cache in caches:
        cache.index_copy_(0, targets, cache.index_select(0, sources))
