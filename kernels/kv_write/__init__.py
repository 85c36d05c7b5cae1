"""Store the keys and values of packed tokens, and copy whole blocks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kernels import backend
from kernels.errors import check_shape
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
    """
    blocks, kv_heads, block_size, key_dim = key_cache.shape
    check_shape("key", key, plan.num_tokens, kv_heads, key_dim)
    check_shape("value_cache", value_cache, blocks, kv_heads, block_size, None)
    check_shape("value", value, plan.num_tokens, kv_heads, value_cache.shape[3])
    if backend.uses_triton(key_cache):
        from kernels.kv_write import triton_kernel

        triton_kernel.kv_write(key, value, key_cache, value_cache, plan)
        return
    from kernels.kv_write import reference

    reference.kv_write(key, value, key_cache, value_cache, plan)


def copy_blocks(caches: Sequence[Tensor], copies: Sequence[tuple[int, int]]) -> None:
    """Copy blocks (source, target) in every cache. No block is both source and target.

    Semantics:
        for cache in caches:
            for source, target in copies:
                cache[target] = cache[source]
    """
    from kernels.kv_write import reference

    reference.copy_blocks(caches, copies)
