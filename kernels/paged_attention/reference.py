"""The definition in torch: gather each sequence's blocks, then ordinary attention.

Decodes of similar length share one gather and one call, since a call per sequence and layer
would cost more than the arithmetic. Chunks of a prompt are taken one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.paged_attention import AttentionPlan

PADDING = 1.25  # a group's longest decode over its shortest, in blocks


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Sequences with equally many queries, attended in one call.

    `mask` is None where every key is visible; `causal` where it is exactly the lower triangle.
    """

    tokens: Tensor  # int64 [sequences * queries]: rows of the pack
    sequences: int
    cache_rows: Tensor  # int64 [sequences * kv_heads * blocks]: rows of the cache
    num_keys: int
    shortest: int  # keys from here on may belong to nobody
    padding: Tensor | None  # bool [sequences, 1, keys - shortest, 1]
    mask: Tensor | None  # bool [sequences, 1, queries, keys]
    causal: bool


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `kernels.paged_attention.paged_attention`."""
    out = query.new_empty(query.shape[0], query.shape[1], value_cache.shape[3])
    kv_heads = key_cache.shape[1]
    groups = [*_decode_groups(plan, window, kv_heads), *chunk_groups(plan, window, kv_heads)]
    attend_groups(
        groups, query, key_cache, value_cache, out, scale=scale, softcap=softcap, sinks=sinks
    )
    return out


def attend_groups(
    groups: list[Group],
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    out: Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Fill the rows of `out` that belong to `groups`."""
    _, heads, key_dim = query.shape
    for group in groups:
        keys = _gather(key_cache, group)
        values = _gather(value_cache, group)
        rows = query.index_select(0, group.tokens)
        queries = rows.view(group.sequences, -1, heads, key_dim).transpose(1, 2)
        if softcap is None and sinks is None:
            attended = _fused(queries, keys, values, group, scale)
        else:
            attended = _explicit(queries, keys, values, group, scale, softcap, sinks)
        attended = attended.transpose(1, 2).reshape(-1, heads, value_cache.shape[3])
        out.index_copy_(0, group.tokens, attended)


def _gather(cache: Tensor, group: Group) -> Tensor:
    """[blocks, kv_heads, block_size, dim] -> [sequences, kv_heads, keys, dim]."""
    blocks, kv_heads, block_size, dim = cache.shape
    rows = cache.view(blocks * kv_heads, block_size * dim).index_select(0, group.cache_rows)
    gathered = rows.view(group.sequences, kv_heads, -1, dim)[:, :, : group.num_keys]
    if group.padding is not None:
        gathered[:, :, group.shortest :].masked_fill_(group.padding, 0)
    return gathered


def _fused(queries: Tensor, keys: Tensor, values: Tensor, group: Group, scale: float) -> Tensor:
    sequences, heads, count, _ = queries.shape
    if count > 1:
        return F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=group.mask,
            is_causal=group.causal,
            scale=scale,
            enable_gqa=True,
        )
    # One query each: the heads that share a key become the rows of one product.
    stacked = queries.reshape(sequences, keys.shape[1], -1, queries.shape[3])
    attended = F.scaled_dot_product_attention(
        stacked, keys, values, attn_mask=group.mask, scale=scale
    )
    return attended.reshape(sequences, heads, 1, values.shape[3])


def _explicit(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    group: Group,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    repeat = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(repeat, 1), values.repeat_interleave(repeat, 1)
    scores = torch.matmul(queries.float(), keys.float().transpose(2, 3)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if group.causal:
        visible = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~visible, -torch.inf)
    elif group.mask is not None:
        scores = scores.masked_fill(~group.mask, -torch.inf)
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.softmax(torch.cat([scores, column], 3), 3)[..., :-1]
    else:
        weights = torch.softmax(scores, 3)
    return torch.matmul(weights, values.float()).to(queries.dtype)


def chunk_groups(plan: AttentionPlan, window: int | None, kv_heads: int) -> list[Group]:
    """One group for each sequence with several queries, planned once per step."""
    key = ("chunks", window, kv_heads)
    if key not in plan.derived:
        chunks = [index for index, count in enumerate(plan.query_lens) if count > 1]
        plan.derived[key] = [_group(plan, [index], window, kv_heads) for index in chunks]
    return cast(list[Group], plan.derived[key])


def _decode_groups(plan: AttentionPlan, window: int | None, kv_heads: int) -> list[Group]:
    key = ("decodes", window, kv_heads)
    if key not in plan.derived:
        members = _similar_decodes(plan, window)
        plan.derived[key] = [_group(plan, indices, window, kv_heads) for indices in members]
    return cast(list[Group], plan.derived[key])


def _similar_decodes(plan: AttentionPlan, window: int | None) -> Iterator[list[int]]:
    """Indices of sequences with one query, those of similar length together."""

    def blocks(index: int) -> int:
        first = _first_key(plan, index, window) // plan.block_size
        return -(-plan.kv_lens[index] // plan.block_size) - first

    decodes = [index for index, count in enumerate(plan.query_lens) if count == 1]
    group: list[int] = []
    for index in sorted(decodes, key=blocks):
        if group and blocks(index) > max(PADDING * blocks(group[0]), blocks(group[0]) + 1):
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def _first_key(plan: AttentionPlan, index: int, window: int | None) -> int:
    """The earliest position that any query of the sequence sees."""
    if window is None:
        return 0
    return max(0, plan.kv_lens[index] - plan.query_lens[index] - window + 1)


def _group(plan: AttentionPlan, indices: list[int], window: int | None, kv_heads: int) -> Group:
    device, size, count = plan.slots.device, plan.block_size, plan.query_lens[indices[0]]
    first_blocks = [_first_key(plan, index, window) // size for index in indices]
    lengths = [
        plan.kv_lens[index] - first * size
        for index, first in zip(indices, first_blocks, strict=True)
    ]
    longest, shortest = max(lengths), min(lengths)
    blocks = -(-longest // size)
    columns = torch.tensor(first_blocks, device=device)[:, None] + torch.arange(
        blocks, device=device
    )
    columns.clamp_(max=plan.block_tables.shape[1] - 1)
    tables = plan.block_tables[torch.tensor(indices, device=device)].gather(1, columns)
    heads = torch.arange(kv_heads, device=device)
    cache_rows = (tables[:, None, :] * kv_heads + heads[:, None]).reshape(-1)

    ends = torch.tensor(lengths, device=device)[:, None, None]
    keys = torch.arange(longest, device=device)
    positions = ends - count + torch.arange(count, device=device)[:, None]
    visible = keys <= positions
    if window is not None:
        visible &= keys > positions - window
    causal = count > 1 and count == longest and (window is None or window >= longest)
    plain = causal or (count == 1 and bool(visible.all()))
    padding = None
    if shortest < longest:
        padding = (keys[shortest:] >= ends[:, 0])[:, None, :, None]
    starts = torch.tensor([plan.starts[index] for index in indices], device=device)
    return Group(
        tokens=(starts[:, None] + torch.arange(count, device=device)).reshape(-1),
        sequences=len(indices),
        cache_rows=cache_rows,
        num_keys=longest,
        shortest=shortest,
        padding=padding,
        mask=None if plain else visible[:, None],
        causal=causal,
    )
