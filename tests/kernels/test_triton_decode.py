"""Decoding rows in Triton: long contexts, shared prefixes, and the bits of a row."""

import pytest
import torch

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

from kernels.paged_attention import AttentionPlan, reference  # noqa: E402
from kernels.paged_attention import triton_kernel as attention  # noqa: E402

BLOCK, BLOCKS, HEADS, KV_HEADS, DIM = 16, 80, 6, 2, 16
PREFIX = list(range(60, 76))  # 256 tokens
TABLES = [  # three rows share all of PREFIX, a fourth half of it, the fifth nothing
    [*PREFIX, *range(3)],
    [*PREFIX, 3],
    [*PREFIX, *range(4, 12)],
    [*PREFIX[:8], *range(12, 20)],
    list(range(20, 41)),
]
LENGTHS = [300, 257, 384, 140, 333]
OPTIONS = {
    "plain": {},
    "window": {"window": 150},
    "narrow window": {"window": 3},
    "everything": {"window": 200, "softcap": 2.0, "sinks": True},
}


def inputs(dtype, counts=(1,) * 5):
    generator = torch.Generator().manual_seed(3)
    caches = [
        torch.randn(BLOCKS, KV_HEADS, BLOCK, DIM, generator=generator).to(dtype) for _ in range(2)
    ]
    used = {block for table in TABLES for block in table}
    for cache in caches:
        cache[sorted(set(range(BLOCKS)) - used)] = torch.nan
        for table, length in zip(TABLES, LENGTHS, strict=True):
            blocks = -(-length // BLOCK)
            cache[table[blocks:]] = torch.nan
            if length % BLOCK:
                cache[table[blocks - 1], :, length % BLOCK :] = torch.nan
    query = torch.randn(sum(counts), HEADS, DIM, generator=generator).to(dtype)
    return [tensor.to(DEVICE) for tensor in (query, *caches)]


def options_of(options):
    sinks = torch.linspace(-1, 2, HEADS, device=DEVICE) if options.get("sinks") else None
    return {"scale": DIM**-0.5, **options, "sinks": sinks}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_shared_and_long_rows_equal_the_definition(options):
    query, keys, values = inputs(torch.float32, (1, 1, 5, 1, 1))
    plan = AttentionPlan.build((1, 1, 5, 1, 1), LENGTHS, TABLES, BLOCK, DEVICE)
    arguments = (query, keys, values, plan)
    got = attention.paged_attention(*arguments, **options_of(options))
    expected = reference.paged_attention(*arguments, **options_of(options))
    torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_with_those_that_share_its_prefix(options, dtype):
    query, keys, values = inputs(dtype)
    plan = AttentionPlan.build((1,) * 5, LENGTHS, TABLES, BLOCK, DEVICE)
    together = attention.paged_attention(query, keys, values, plan, **options_of(options))
    for row, (length, table) in enumerate(zip(LENGTHS, TABLES, strict=True)):
        one = AttentionPlan.build([1], [length], [table], BLOCK, DEVICE)
        alone = attention.paged_attention(
            query[row : row + 1], keys, values, one, **options_of(options)
        )
        assert torch.equal(alone[0], together[row])
