"""Attention of packed tokens over keys and values in fixed-size blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor

from kernels import backend
from kernels.errors import KernelArgumentError, check_shape
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

    The keys and values of the queries themselves must have been written before.

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
    blocks, kv_heads, block_size, key_dim = key_cache.shape
    check_shape("query", query, plan.num_tokens, None, key_dim)
    check_shape("value_cache", value_cache, blocks, kv_heads, block_size, None)
    if query.shape[1] % kv_heads:
        raise KernelArgumentError("query", f"{query.shape[1]} heads over {kv_heads} kv heads")
    if block_size != plan.block_size:
        raise KernelArgumentError("plan", f"block_size {plan.block_size}, cache has {block_size}")
    if window is not None and window < 1:
        raise KernelArgumentError("window", f"{window} is not positive")
    if sinks is not None:
        check_shape("sinks", sinks, query.shape[1])
    run = _implementation(query)
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


def _implementation(query: Tensor) -> Callable[..., Tensor]:
    """See `kernels.backend`."""
    if backend.uses_triton(query):
        from kernels.paged_attention import triton_kernel

        return triton_kernel.paged_attention
    from kernels.paged_attention import cpu, reference

    return cpu.paged_attention if cpu.is_available(query) else reference.paged_attention


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
