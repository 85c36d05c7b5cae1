"""One program stores one head of one token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.paged_attention import AttentionPlan


@triton.jit  # type: ignore[untyped-decorator]
def kv_write_kernel(
    key: tl.tensor,
    value: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    key_token_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_token_stride: tl.tensor,
    value_head_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
) -> None:
    """Grid [tokens, kv_heads]."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    row = (slot // BLOCK_SIZE * KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
    dims = tl.arange(0, BLOCK_KEY)
    k = tl.load(key + token * key_token_stride + head * key_head_stride + dims, dims < KEY_DIM)
    tl.store(keys + row * KEY_DIM + dims, k, dims < KEY_DIM)
    dims = tl.arange(0, BLOCK_VALUE)
    v = tl.load(
        value + token * value_token_stride + head * value_head_stride + dims, dims < VALUE_DIM
    )
    tl.store(values + row * VALUE_DIM + dims, v, dims < VALUE_DIM)


def kv_write(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan
) -> None:
    """See `kernels.kv_write.kv_write`."""
    if not plan.num_tokens:
        return
    key = key if key.stride(2) == 1 else key.contiguous()
    value = value if value.stride(2) == 1 else value.contiguous()
    _, kv_heads, block_size, key_dim = key_cache.shape
    value_dim = value_cache.shape[3]
    kv_write_kernel[(plan.num_tokens, kv_heads)](
        key,
        value,
        key_cache,
        value_cache,
        plan.slots,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        KV_HEADS=kv_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_SIZE=block_size,
        BLOCK_KEY=triton.next_power_of_2(key_dim),
        BLOCK_VALUE=triton.next_power_of_2(value_dim),
        num_warps=1,
    )
