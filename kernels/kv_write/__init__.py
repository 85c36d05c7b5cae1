"""Store the keys and values of packed tokens, and copy whole blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

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
from kernels.paged_attention import AttentionPlan


def kv_write(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan
) -> None:
    """Write every packed token's key and value into its slot.

    Semantics:
        for t in range(tokens):
            block, offset = divmod(plan.slots[t], block_size)
            key_cache[block, :, offset] = key[t]
            value_cache[block, :, offset] = value[t]

    Shapes:
        key          [tokens, kv_heads, key_dim]
        value        [tokens, kv_heads, value_dim]
        key_cache    [blocks, kv_heads, block_size, key_dim]
        value_cache  [blocks, kv_heads, block_size, value_dim]

    Where within their block and head numbers lie is the implementation's own: only
    `paged_attention` reads them, and `copy_blocks` copies whole blocks.
    """
    if not _fits(key, value, key_cache, value_cache, plan):
        _refuse(key, value, key_cache, value_cache, plan)
    run = _implementation(key_cache.device.type, key_cache.dtype, *key_cache.shape[2:])
    run(key, value, key_cache, value_cache, plan)


def _fits(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan
) -> bool:
    """Whether all is as `kv_write` says."""
    blocks, kv_heads, size, key_dim = key_cache.shape
    value_dim = value_cache.shape[-1]
    return (
        key.shape == (plan.num_tokens, kv_heads, key_dim)
        and value.shape == (plan.num_tokens, kv_heads, value_dim)
        and value_cache.shape == (blocks, kv_heads, size, value_dim)
        and size == plan.block_size
        and plan.last_block < blocks
        and key.dtype is value.dtype is key_cache.dtype is value_cache.dtype
        and key.device == value.device == key_cache.device
        and key_cache.device == value_cache.device == plan.slots.device
        and key_cache.is_contiguous()
        and value_cache.is_contiguous()
    )


def _refuse(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan
) -> None:
    """Raise KernelArgumentError for the first argument that doesn't fit."""
    blocks, kv_heads, size, key_dim = key_cache.shape
    check_contiguous("key_cache", key_cache)
    check_shape("value_cache", value_cache, blocks, kv_heads, size, None)
    check_contiguous("value_cache", value_cache)
    check_shape("key", key, plan.num_tokens, kv_heads, key_dim)
    check_shape("value", value, plan.num_tokens, kv_heads, value_cache.shape[3])
    for name, tensor in (("value_cache", value_cache), ("key", key), ("value", value)):
        check_type(name, tensor, key_cache.dtype)
        check_device(name, tensor, key_cache.device)
    check_device("plan", plan.slots, key_cache.device)
    if size != plan.block_size:
        raise KernelArgumentError("plan", f"block_size {plan.block_size}, cache has {size}")
    raise KernelArgumentError("plan", f"block {plan.last_block} of {blocks}")


@functools.cache
def _implementation(
    device: str, dtype: torch.dtype, block_size: int, key_dim: int
) -> Callable[..., None]:
    """See `kernels.backend`. That of `paged_attention`, which reads what is written here."""
    if backend.triton_serves(device):
        from kernels.kv_write import triton_kernel

        return triton_kernel.kv_write
    from kernels.kv_write import cpu, reference
    from kernels.paged_attention import cpu as attention

    native = attention.serves(device, dtype, block_size, key_dim)
    return cpu.kv_write if native else reference.kv_write


def copy_blocks(caches: Sequence[Tensor], copies: Sequence[tuple[int, int]]) -> None:
    """Copy blocks (source, target) in every cache. No block is both source and target.

    Semantics:
        for cache in caches:
            for source, target in copies:
                cache[target] = cache[source]
    """
    from kernels.kv_write import reference

    reference.copy_blocks(caches, copies)
