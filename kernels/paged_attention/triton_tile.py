"""One block of keys and values, as every attention kernel takes it in."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton_dot import dot


@triton.jit  # type: ignore[untyped-decorator]
def attend(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    positions: tl.tensor,
    start: tl.tensor,
    earliest: tl.tensor,
    end: tl.tensor,
    kv_head: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    sums: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(highest score, sum of weights, weighted values) of each row of `q` after the keys at
    [start, start + BLOCK_N), of which only [earliest, end) may be read.

    Online softmax (Milakov and Gimelshein, 2018). A row that sees none of the keys stays as it is.
    """
    key_dims = tl.arange(0, BLOCK_KEY)
    value_dims = tl.arange(0, BLOCK_VALUE)
    at = start + tl.arange(0, BLOCK_N)
    written = (at >= earliest) & (at < end)
    block = tl.load(table + at // BLOCK_SIZE, mask=written, other=0).to(tl.int64)
    slots = (block * KV_HEADS + kv_head) * BLOCK_SIZE + at % BLOCK_SIZE
    k = tl.load(
        keys + slots[None, :] * KEY_DIM + key_dims[:, None],
        mask=written[None, :] & (key_dims[:, None] < KEY_DIM),
        other=0.0,
    )
    scores = dot(q, k) * scale
    if HAS_SOFTCAP:
        scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
    visible = written[None, :] & (at[None, :] <= positions[:, None])
    if HAS_WINDOW:
        visible = visible & (at[None, :] > positions[:, None] - window)
    scores = tl.where(visible, scores, float("-inf"))
    raised = tl.maximum(highest, tl.max(scores, 1))
    finite = tl.where(raised == float("-inf"), 0.0, raised)
    weights = tl.exp(scores - finite[:, None])
    shrink = tl.exp(highest - finite)
    v = tl.load(
        values + slots[:, None] * VALUE_DIM + value_dims[None, :],
        mask=written[:, None] & (value_dims[None, :] < VALUE_DIM),
        other=0.0,
    )
    total = total * shrink + tl.sum(weights, 1)
    sums = sums * shrink[:, None] + dot(weights.to(v.dtype), v)
    return raised, total, sums
