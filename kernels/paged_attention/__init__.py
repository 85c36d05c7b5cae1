"""Attention of packed tokens over keys and values in fixed-size blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor

from kernels import backend
from kernels.errors import (
    KernelArgumentError,
    check_contiguous,
    check_device,
    check_shape,
    check_type,
)
from kernels.paged_attention.prefixes import SharedPrefixes, find_shared_prefixes


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """Launch metadata of one step, shared by all layers.

    Example: block_size 4, a prompt of 6 tokens and the 10th token of another sequence.

        query_lens    (6, 1)
        kv_lens       (6, 10)                       keys visible to each one's last query
        starts        (0, 6, 7)                     first row of each sequence in the pack
        block_tables  [[3, 1, 0], [7, 2, 5]]        padded with 0
        slots         [12, 13, 14, 15, 4, 5, 21]    where each row's key and value go

    `derived` holds what a backend computes from these once per step.
    """

    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    starts: tuple[int, ...]
    block_tables: Tensor  # int64 [sequences, most blocks]
    slots: Tensor  # int64 [tokens]
    block_size: int
    last_block: int  # the largest of the block tables; -1 if there is none
    derived: dict[object, object] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> AttentionPlan:
        """Raises KernelArgumentError when a block table is too short for its `kv_len`."""
        _check_lengths(query_lens, kv_lens, block_tables, block_size)
        width = max((-(-length // block_size) for length in kv_lens), default=0)
        slots: list[int] = []
        padded: list[list[int]] = []
        for count, length, table in zip(query_lens, kv_lens, block_tables, strict=True):
            used = -(-length // block_size)
            padded.append([*table[:used], *([0] * (width - used))])
            slots += (
                table[position // block_size] * block_size + position % block_size
                for position in range(length - count, length)
            )
        return cls(
            query_lens=tuple(query_lens),
            kv_lens=tuple(kv_lens),
            starts=tuple(accumulate(query_lens, initial=0)),
            block_tables=torch.tensor(padded, dtype=torch.int64, device=device),
            slots=torch.tensor(slots, dtype=torch.int64, device=device),
            block_size=block_size,
            last_block=max((max(row) for row in padded if row), default=-1),
        )

    @property
    def num_tokens(self) -> int:
        return self.starts[-1]

    @property
    def shared_prefixes(self) -> SharedPrefixes:
        """Found at first use; kernels that read a shared prefix once need it."""
        if "shared prefixes" not in self.derived:
            self.derived["shared prefixes"] = find_shared_prefixes(self)
        return cast(SharedPrefixes, self.derived["shared prefixes"])


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
    """Causal attention of every packed query over its own sequence's blocks.

    The keys and values of the queries themselves must have been written before, all of them by
    `kernels.kv_write`.

    Semantics:
        for s, (count, length) in enumerate(zip(plan.query_lens, plan.kv_lens)):
            for i in range(count):
                position = length - count + i
                first = 0 if window is None else max(0, position - window + 1)
                for h in range(heads):
                    scores = [
                        scale * dot(query[plan.starts[s] + i, h], key(s, p, h // group))
                        for p in range(first, position + 1)
                    ]
                    if softcap: scores = [softcap * tanh(x / softcap) for x in scores]
                    if sinks:   scores = [*scores, sinks[h]]         # takes weight, adds nothing
                    weights = softmax(scores)
                    out[plan.starts[s] + i, h] = sum(
                        weights[p - first] * value(s, p, h // group)
                        for p in range(first, position + 1)
                    )
        where key(s, p, h) = key_cache[block_tables[s, p // block_size], h, p % block_size]

    Shapes:
        query        [tokens, heads, key_dim]
        key_cache    [blocks, kv_heads, block_size, key_dim]     group = heads / kv_heads
        value_cache  [blocks, kv_heads, block_size, value_dim]
        sinks        [heads] or None
        returns      [tokens, heads, value_dim] of query's type; sums are float32

    Whatever lies in slots past a sequence's end, even NaN, has no effect.
    """
    if not _fits(query, key_cache, value_cache, plan, window, softcap, sinks):
        _refuse(query, key_cache, value_cache, plan, window, softcap, sinks)
        query = query.contiguous()
    run = _implementation(query.device.type, query.dtype, *key_cache.shape[2:])
    return run(
        query,
        key_cache,
        value_cache,
        plan,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )


def _fits(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> bool:
    """Whether all is as `paged_attention` says, and each head of `query` without gaps."""
    if query.ndim != 3 or key_cache.ndim != 4:
        return False
    tokens, heads, dim = query.shape
    blocks, kv_heads, size, key_dim = key_cache.shape
    return (
        tokens == plan.num_tokens
        and dim == key_dim
        and kv_heads > 0
        and heads % kv_heads == 0
        and size == plan.block_size
        and value_cache.shape == (blocks, kv_heads, size, value_cache.shape[-1])
        and query.dtype is key_cache.dtype is value_cache.dtype
        and query.dtype.is_floating_point
        and query.device == key_cache.device == value_cache.device == plan.slots.device
        and query.stride(2) == 1
        and key_cache.is_contiguous()
        and value_cache.is_contiguous()
        and plan.last_block < blocks
        and (window is None or window > 0)
        and (softcap is None or softcap > 0)
        and (sinks is None or (sinks.shape == (heads,) and sinks.device == query.device))
    )


def _refuse(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Raise KernelArgumentError for the first argument that doesn't fit, if one doesn't."""
    check_shape("key_cache", key_cache, None, None, None, None)
    blocks, kv_heads, size, key_dim = key_cache.shape
    if not query.dtype.is_floating_point:
        raise KernelArgumentError("query", f"{query.dtype} is not a floating point type")
    check_shape("query", query, plan.num_tokens, None, key_dim)
    check_shape("value_cache", value_cache, blocks, kv_heads, size, None)
    if not kv_heads or query.shape[1] % kv_heads:
        raise KernelArgumentError("query", f"{query.shape[1]} heads over {kv_heads} kv heads")
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        check_type(name, cache, query.dtype)
        check_device(name, cache, query.device)
        check_contiguous(name, cache)
    check_device("plan", plan.slots, query.device)
    if size != plan.block_size:
        raise KernelArgumentError("plan", f"block_size {plan.block_size}, cache has {size}")
    if plan.last_block >= blocks:
        raise KernelArgumentError("plan", f"block {plan.last_block} of {blocks}")
    if window is not None and window < 1:
        raise KernelArgumentError("window", f"{window} is not positive")
    if softcap is not None and not softcap > 0:
        raise KernelArgumentError("softcap", f"{softcap} is not positive")
    if sinks is not None:
        check_shape("sinks", sinks, query.shape[1])
        check_device("sinks", sinks, query.device)


@functools.cache
def _implementation(
    device: str, dtype: torch.dtype, block_size: int, key_dim: int
) -> Callable[..., Tensor]:
    """See `kernels.backend`."""
    if backend.triton_serves(device):
        from kernels.paged_attention import triton_kernel

        return triton_kernel.paged_attention
    from kernels.paged_attention import cpu, reference

    native = cpu.serves(device, dtype, block_size, key_dim)
    return cpu.paged_attention if native else reference.paged_attention


def _check_lengths(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
) -> None:
    if not len(query_lens) == len(kv_lens) == len(block_tables):
        raise KernelArgumentError("block_tables", "one entry per sequence is needed")
    for index, (count, length) in enumerate(zip(query_lens, kv_lens, strict=True)):
        if not 1 <= count <= length:
            raise KernelArgumentError("query_lens", f"sequence {index}: {count} of {length}")
        if len(block_tables[index]) * block_size < length:
            raise KernelArgumentError("block_tables", f"sequence {index}: too short for {length}")
        if min(block_tables[index]) < 0:
            raise KernelArgumentError("block_tables", f"sequence {index}: a block below 0")
