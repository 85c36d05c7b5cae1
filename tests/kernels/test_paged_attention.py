"""Paged attention against its docstring's loop in float64."""

import inspect
import math

import pytest
import torch

from kernels import native
from kernels.errors import KernelArgumentError
from kernels.kv_write import copy_blocks, kv_write
from kernels.kv_write import cpu as kv_cpu
from kernels.kv_write import reference as kv_reference
from kernels.paged_attention import AttentionPlan, cpu, paged_attention, reference

CASES = {
    "plain": {},
    "window": {"window": 5},
    "window of one": {"window": 1},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "everything": {"window": 7, "softcap": 3.0, "sinks": True},
}
SHAPES = {  # (query_len, kv_len) of each sequence
    "one token": [(1, 1)],
    "decodes": [(1, 9), (1, 1), (1, 33), (1, 34), (1, 16)],
    "whole prompts": [(5, 5), (37, 37), (1, 1)],
    "mixed": [(1, 20), (6, 6), (3, 21), (1, 4), (16, 32), (1, 100)],
}


def tables(kv_lens, block_size, generator):
    """Disjoint block tables in random order, and how many blocks there are."""
    needed = [-(-length // block_size) for length in kv_lens]
    order = torch.randperm(sum(needed) + 3, generator=generator).tolist()
    result = []
    for count in needed:
        result.append([order.pop() for _ in range(count)])
    return result, sum(needed) + 3


def naive(query, keys, values, plan, scale, window=None, softcap=None, sinks=None):
    heads, group = query.shape[1], query.shape[1] // keys[0].shape[1]
    out = torch.empty(query.shape[0], heads, values[0].shape[2], dtype=torch.float64)
    for s, (count, length) in enumerate(zip(plan.query_lens, plan.kv_lens, strict=True)):
        for i in range(count):
            position = length - count + i
            first = 0 if window is None else max(0, position - window + 1)
            for h in range(heads):
                row = plan.starts[s] + i
                k = keys[s][first : position + 1, h // group].double()
                scores = scale * (k @ query[row, h].double())
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[h : h + 1].double()])
                weights = torch.softmax(scores, 0)[: k.shape[0]]
                out[row, h] = weights @ values[s][first : position + 1, h // group].double()
    return out


BACKENDS = [
    (reference, kv_reference),
    pytest.param(
        (cpu, kv_cpu),
        marks=pytest.mark.skipif(native.library(cpu.SOURCE) is None, reason="no C++ compiler"),
    ),
]


@pytest.mark.parametrize("backend", BACKENDS, ids=["reference", "cpu"])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_equals_the_loop(shape, options, heads, backend):
    generator = torch.Generator().manual_seed(1)
    num_heads, kv_heads, key_dim, value_dim, block_size = *heads, 12, 8, 4
    query_lens, kv_lens = [q for q, _ in shape], [kv for _, kv in shape]
    block_tables, blocks = tables(kv_lens, block_size, generator)
    key_cache = torch.full((blocks, kv_heads, block_size, key_dim), torch.nan)
    value_cache = torch.full((blocks, kv_heads, block_size, value_dim), torch.nan)
    keys = [torch.randn(n, kv_heads, key_dim, generator=generator) for n in kv_lens]
    values = [torch.randn(n, kv_heads, value_dim, generator=generator) for n in kv_lens]
    whole = AttentionPlan.build(kv_lens, kv_lens, block_tables, block_size)
    attention, writer = backend
    writer.kv_write(torch.cat(keys), torch.cat(values), key_cache, value_cache, whole)

    plan = AttentionPlan.build(query_lens, kv_lens, block_tables, block_size)
    query = torch.randn(sum(query_lens), num_heads, key_dim, generator=generator)
    options = dict(options)
    if options.get("sinks"):
        options["sinks"] = torch.randn(num_heads, generator=generator)
    got = attention.paged_attention(query, key_cache, value_cache, plan, scale=0.3, **options)
    expected = naive(query, keys, values, plan, 0.3, **options)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dim", [16, 64, 128])
@pytest.mark.parametrize("backend", BACKENDS, ids=["reference", "cpu"])
def test_bfloat16_stays_within_its_rounding(backend, dim):
    generator = torch.Generator().manual_seed(2)
    kv_lens = [40, 41, 7]
    block_tables, blocks = tables(kv_lens, 16, generator)
    caches = [torch.zeros(blocks, 2, 16, dim, dtype=torch.bfloat16) for _ in range(2)]
    keys, values = (
        [torch.randn(n, 2, dim, generator=generator).bfloat16() for n in kv_lens] for _ in range(2)
    )
    whole = AttentionPlan.build(kv_lens, kv_lens, block_tables, 16)
    attention, writer = backend
    writer.kv_write(torch.cat(keys), torch.cat(values), *caches, whole)
    plan = AttentionPlan.build([1, 3, 7], kv_lens, block_tables, 16)
    query = torch.randn(11, 4, dim, generator=generator).bfloat16()
    got = attention.paged_attention(query, *caches, plan, scale=0.25)
    assert got.dtype == torch.bfloat16
    expected = naive(query, keys, values, plan, 0.25)
    torch.testing.assert_close(got.double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.skipif(native.library(cpu.SOURCE) is None, reason="no C++ compiler")
def test_a_decode_is_bitwise_the_same_alone_and_in_a_batch():
    generator = torch.Generator().manual_seed(3)
    kv_lens = [40, 300, 7, 41]
    block_tables, blocks = tables(kv_lens, 16, generator)
    caches = [torch.randn(blocks, 2, 16, 64, generator=generator) for _ in range(2)]
    query = torch.randn(4, 6, 64, generator=generator)
    together = AttentionPlan.build([1] * 4, kv_lens, block_tables, 16)
    batch = cpu.paged_attention(query, *caches, together, scale=0.125)
    for row in range(4):
        plan = AttentionPlan.build([1], kv_lens[row : row + 1], block_tables[row : row + 1], 16)
        alone = cpu.paged_attention(query[row : row + 1], *caches, plan, scale=0.125)
        assert torch.equal(alone[0], batch[row])


def test_both_backends_have_one_signature():
    assert inspect.signature(cpu.paged_attention) == inspect.signature(reference.paged_attention)
    assert inspect.signature(paged_attention) == inspect.signature(reference.paged_attention)


def test_the_example_of_the_plan():
    plan = AttentionPlan.build((6, 1), (6, 10), ([3, 1], [7, 2, 5]), 4)
    assert plan.starts == (0, 6, 7)
    assert plan.block_tables.tolist() == [[3, 1, 0], [7, 2, 5]]
    assert plan.slots.tolist() == [12, 13, 14, 15, 4, 5, 21]


def test_copied_blocks_equal_their_source():
    cache = torch.randn(5, 2, 4, 3)
    before = cache.clone()
    copy_blocks([cache], [(0, 3), (1, 4)])
    torch.testing.assert_close(cache[3:], before[:2], rtol=0, atol=0)
    torch.testing.assert_close(cache[:3], before[:3], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("query", {"query": torch.zeros(2, 4, 8)}),
        ("query", {"query": torch.zeros(1, 3, 8)}),
        ("value_cache", {"value_cache": torch.zeros(1, 2, 4, 8)}),
        ("plan", {"plan": AttentionPlan.build([1], [1], [[0]], 8)}),
        ("query", {"query": torch.zeros(1, 4)}),
        ("query", {"query": torch.zeros(1, 4, 8, dtype=torch.int32)}),
        ("key_cache", {"key_cache": torch.zeros(2, 4, 8)}),
        ("key_cache", {"key_cache": torch.zeros(2, 2, 4, 8).bfloat16()}),
        ("key_cache", {"key_cache": torch.zeros(2, 2, 4, 8, device="meta")}),
        ("key_cache", {"key_cache": torch.zeros(2, 4, 2, 8).transpose(1, 2)}),
        ("value_cache", {"value_cache": torch.zeros(2, 2, 4, 8).half()}),
        ("value_cache", {"value_cache": torch.zeros(2, 2, 4, 9)[..., 1:]}),
        ("plan", {"plan": AttentionPlan.build([1], [1], [[2]], 4)}),
        ("plan", {"plan": AttentionPlan.build([1], [1], [[0]], 4, "meta")}),
        ("window", {"window": 0}),
        ("softcap", {"softcap": -1.0}),
        ("softcap", {"softcap": math.nan}),
        ("sinks", {"sinks": torch.zeros(3)}),
        ("sinks", {"sinks": torch.zeros(4, device="meta")}),
    ],
)
def test_a_wrong_argument_is_named(argument, change):
    arguments = {
        "query": torch.zeros(1, 4, 8),
        "key_cache": torch.zeros(2, 2, 4, 8),
        "value_cache": torch.zeros(2, 2, 4, 8),
        "plan": AttentionPlan.build([1], [1], [[0]], 4),
        "scale": 1 / math.sqrt(8),
    }
    with pytest.raises(KernelArgumentError) as error:
        paged_attention(**{**arguments, **change})
    assert error.value.argument == argument


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("key", {"key": torch.zeros(2, 2, 8)}),
        ("key", {"key": torch.zeros(1, 2, 8).half()}),
        ("key", {"key": torch.zeros(1, 2, 8, device="meta")}),
        ("value", {"value": torch.zeros(1, 2, 9)}),
        ("value", {"value": torch.zeros(1, 2, 8).double()}),
        ("key_cache", {"key_cache": torch.zeros(2, 4, 2, 8).transpose(1, 2)}),
        ("value_cache", {"value_cache": torch.zeros(2, 2, 4, 8).half()}),
        ("value_cache", {"value_cache": torch.zeros(3, 2, 4, 8)}),
        ("plan", {"plan": AttentionPlan.build([1], [1], [[0]], 8)}),
        ("plan", {"plan": AttentionPlan.build([1], [1], [[2]], 4)}),
        ("plan", {"plan": AttentionPlan.build([1], [1], [[0]], 4, "meta")}),
    ],
)
def test_a_wrong_write_is_refused_before_anything_is_written(argument, change):
    arguments = {
        "key": torch.ones(1, 2, 8),
        "value": torch.ones(1, 2, 8),
        "key_cache": torch.zeros(2, 2, 4, 8),
        "value_cache": torch.zeros(2, 2, 4, 8),
        "plan": AttentionPlan.build([1], [1], [[0]], 4),
        **change,
    }
    with pytest.raises(KernelArgumentError) as error:
        kv_write(**arguments)
    assert error.value.argument == argument
    assert not arguments["key_cache"].any()
    assert not arguments["value_cache"].any()


@pytest.mark.parametrize(
    ("argument", "query_lens", "kv_lens", "block_tables"),
    [
        ("block_tables", [1], [5], [[0]]),
        ("query_lens", [3], [2], [[0]]),
        ("query_lens", [0], [2], [[0]]),
        ("block_tables", [1, 1], [1, 1], [[0]]),
        ("block_tables", [1], [1], [[-1]]),
    ],
)
def test_a_wrong_plan_is_refused(argument, query_lens, kv_lens, block_tables):
    with pytest.raises(KernelArgumentError) as error:
        AttentionPlan.build(query_lens, kv_lens, block_tables, 4)
    assert error.value.argument == argument
