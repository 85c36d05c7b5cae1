"""The C++ attention against float64 in awkward shapes, and a row's bits alone and in batches."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels import native
from kernels.kv_write import cpu as kv_cpu
from kernels.kv_write import kv_write
from kernels.kv_write import reference as kv_reference
from kernels.paged_attention import AttentionPlan, cpu, paged_attention, reference
from kernels.paged_attention.prefixes import SharedPrefixes, find_shared_prefixes

pytestmark = pytest.mark.skipif(native.library(cpu.SOURCE) is None, reason="no C++ compiler")

EPSILON = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
BORDERS = [1, 7, 8, 9, 63, 64, 65, 128, 129]


def tables_of(kv_lens, size, generator, shared=()):
    """Random disjoint block tables, but for `shared`: (sequence, of sequence, blocks)."""
    tables, blocks = [], 0
    sources = {target: (source, count) for target, source, count in shared}
    for index, length in enumerate(kv_lens):
        source, count = sources.get(index, (0, 0))
        own = -(-length // size) - count
        first = tables[source][:count] if count else []
        tables.append([*first, *range(blocks, blocks + own)])
        blocks += own
    order = torch.randperm(blocks + 2, generator=generator).tolist()
    return [[order[block] for block in table] for table in tables], blocks + 2


def make(pairs, heads=(6, 2), dims=(64, 64), dtype=torch.float32, size=8, shared=(), seed=0):
    """(query, caches, plan, tables); slots that belong to nobody hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    counts, lengths = [count for count, _ in pairs], [length for _, length in pairs]
    tables, blocks = tables_of(lengths, size, generator, shared)
    caches = [torch.full((blocks, heads[1], size, dim), torch.nan, dtype=dtype) for dim in dims]
    whole = AttentionPlan.build(lengths, lengths, tables, size)
    rows = [torch.randn(sum(lengths), heads[1], dim, generator=generator).to(dtype) for dim in dims]
    kv_reference.kv_write(*rows, *caches, whole)
    plan = AttentionPlan.build(counts, lengths, tables, size)
    query = torch.randn(sum(counts), heads[0], dims[0], generator=generator).to(dtype)
    return query, caches, plan, tables


def attend(query, caches, plan, **options):
    """The kernel's result, of caches in the order of their definition."""
    return cpu.paged_attention(query, *rewritten(caches), plan, **options)


def rewritten(caches):
    """All slots, those of nobody too, as the C++ kernel writes them."""
    blocks, heads, size, _ = caches[0].shape
    slots = blocks * size
    rows = [cache.transpose(1, 2).reshape(slots, heads, -1) for cache in caches]
    found = [torch.empty_like(cache) for cache in caches]
    plan = AttentionPlan.build([slots], [slots], [list(range(blocks))], size)
    kv_cpu.kv_write(*rows, *found, plan)
    return found


def expected(query, caches, plan, tables, scale, window=None, softcap=None, sinks=None):
    """float64, and by which its rounding errors are judged: the sum of |weight * value| where
    numbers are float32, and the root of the sum of their squares where weights are rounded."""
    group = query.shape[1] // caches[0].shape[1]
    outs, sizes = [], []
    for s, (count, length) in enumerate(zip(plan.query_lens, plan.kv_lens, strict=True)):
        k, v = (
            cache[tables[s]].transpose(0, 1).flatten(1, 2)[:, :length].double() for cache in caches
        )
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        q = query[plan.starts[s] : plan.starts[s + 1]].double().transpose(0, 1)
        scores = q @ k.transpose(1, 2) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        at = torch.arange(length - count, length)[:, None]
        keys = torch.arange(length)
        hidden = (keys > at) | (keys <= at - (window or length))
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            column = sinks.double()[:, None, None].expand(-1, count, 1)
            weights = torch.softmax(torch.cat([scores, column], 2), 2)[..., :-1]
        else:
            weights = torch.softmax(scores, 2)
        outs.append((weights @ v).transpose(0, 1))
        if query.dtype == torch.bfloat16:
            sizes.append((weights**2 @ v**2).sqrt().transpose(0, 1))
        else:
            sizes.append((weights @ v.abs()).transpose(0, 1))
    return torch.cat(outs), torch.cat(sizes)


def assert_exact(found, want, sizes, dtype, steps=0):
    """One rounding of the output's type, and `steps` float32 roundings of what was summed, or the
    rounding of each weight, in all directions."""
    each = 2 * EPSILON[dtype] if dtype == torch.bfloat16 else steps * 2.0**-24
    allowed = EPSILON[dtype] * want.abs() + each * sizes + 1e-30
    assert torch.isfinite(found).all()
    worst = ((found.double() - want).abs() / allowed).max()
    assert worst <= 1, f"{worst:.2f} times what rounding explains"


OPTIONS = {
    "plain": {},
    "window": {"window": 40},
    "softcap": {"softcap": 2.0},
    "everything": {"window": 70, "softcap": 3.0, "sinks": True},
}


@pytest.mark.parametrize("dtype", EPSILON, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_head_sizes(dims, options, dtype):
    pairs = [(1, length) for length in BORDERS] + [(7, 7), (3, 66), (64, 64), (20, 150)]
    query, caches, plan, tables = make(pairs, (6, 2), dims, dtype)
    options = {"scale": dims[0] ** -0.5, **options}
    if options.get("sinks"):
        options["sinks"] = torch.randn(6, generator=torch.Generator().manual_seed(5))
    found = attend(query, caches, plan, **options)
    want, sizes = expected(query, caches, plan, tables, **options)
    assert found.dtype == dtype
    assert_exact(found, want, sizes, dtype, steps=32)


@pytest.mark.parametrize("heads", [(4, 4), (5, 1), (9, 3), (64, 1)])
@pytest.mark.parametrize("size", [1, 8, 16, 24, 128])
def test_groups_and_block_sizes(size, heads):
    query, caches, plan, tables = make(
        [(1, 1), (70, 70), (1, 100), (5, 64)], heads, (16, 24), size=size
    )
    found = attend(query, caches, plan, scale=0.25)
    assert_exact(found, *expected(query, caches, plan, tables, scale=0.25), torch.float32, steps=32)


@pytest.mark.full
@pytest.mark.parametrize("dtype", EPSILON, ids=str)
@pytest.mark.parametrize("length", [1023, 1024, 1025, 2049, 4096, 8192])
def test_long_contexts(length, dtype):
    pairs = [(1, length), (17, length), (1, 5)]
    query, caches, plan, tables = make(pairs, (6, 2), (64, 64), dtype)
    for window in (None, 1500):
        found = attend(query, caches, plan, scale=0.125, window=window)
        want, sizes = expected(query, caches, plan, tables, 0.125, window)
        assert_exact(found, want, sizes, dtype, steps=64)


def one(query, caches, plan, tables, index, row, options):
    """The sequence's query number `row`, computed alone."""
    position = plan.kv_lens[index] - plan.query_lens[index] + row
    alone = AttentionPlan.build([1], [position + 1], [tables[index]], plan.block_size)
    start = plan.starts[index] + row
    return attend(query[start : start + 1], caches, alone, **options)[0]


@pytest.mark.parametrize("dtype", EPSILON, ids=str)
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("options", [{}, {"window": 1300}, {"window": 90, "softcap": 2.0}])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(options, threads, dtype):
    pairs = [(1, 300), (1, 290), (1, 2100), (40, 200), (3, 1200), (1, 64), (1, 2300)]
    shared = [(1, 0, 30), (6, 2, 200)]
    query, caches, plan, tables = make(pairs, (6, 2), (64, 80), dtype, shared=shared)
    options = {"scale": 0.125, **options}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = attend(query, caches, plan, **options)
        for index, row in [
            (0, 0),
            (1, 0),
            (2, 0),
            (3, 0),
            (3, 17),
            (3, 39),
            (4, 2),
            (5, 0),
            (6, 0),
        ]:
            alone = one(query, caches, plan, tables, index, row, options)
            assert torch.equal(alone, found[plan.starts[index] + row]), (index, row)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", EPSILON, ids=str)
def test_groups_within_groups_read_a_prefix_together(dtype):
    """Fourteen sequences share 230 tokens, seven of them 330, and one leaves off in the middle."""
    lengths = [350, *range(340, 346), *range(240, 247), 200]
    shared = [(i, 0, 41) for i in range(1, 7)] + [(i, 0, 28) for i in range(7, 14)] + [(14, 0, 25)]
    query, caches, plan, tables = make(
        [(1, length) for length in lengths], (9, 3), dtype=dtype, shared=shared
    )
    assert max(plan.shared_prefixes.blocks) == 41
    found = attend(query, caches, plan, scale=0.125)
    want, sizes = expected(query, caches, plan, tables, scale=0.125)
    assert_exact(found, want, sizes, dtype, steps=32)
    for index in range(len(lengths)):
        assert torch.equal(
            one(query, caches, plan, tables, index, 0, {"scale": 0.125}), found[index]
        )


def test_a_broken_token_hurts_only_those_that_see_it():
    query, caches, plan, tables = make([(9, 9), (1, 9), (1, 40)])
    clean = attend(query, caches, plan, scale=0.125)
    block = tables[0][0]
    caches[1][block, :, 5] = torch.inf
    caches[0][block, :, 6] = torch.nan
    found = attend(query, caches, plan, scale=0.125)
    assert torch.equal(found[:5], clean[:5])
    assert torch.equal(found[9:], clean[9:])
    assert not torch.isfinite(found[5:9]).any()


def test_strided_queries_are_read_in_place():
    query, caches, plan, _ = make([(5, 9), (1, 3)])
    strided = query.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    found = attend(strided, caches, plan, scale=0.1)
    assert torch.equal(found, attend(query, caches, plan, scale=0.1))


@pytest.mark.parametrize("dtype", EPSILON, ids=str)
@pytest.mark.parametrize("size", [2, 8, 24])
@pytest.mark.parametrize("strided", [False, True])
def test_what_is_written_is_all_that_changes(strided, size, dtype):
    """Attention over one key of weight 1 gives its value back: so each slot is read in turn."""
    slots, heads, dims = [0, 1, size, 3 * size - 1], 2, (6, 10)
    generator = torch.Generator().manual_seed(4)
    rows = [torch.randn(len(slots), heads, dim, generator=generator).to(dtype) for dim in dims]
    if strided:
        rows = [row.transpose(0, 2).contiguous().transpose(0, 2) for row in rows]
    caches = [torch.full((3, heads, size, dim), torch.nan, dtype=dtype) for dim in dims]
    lengths, tables = [slot % size + 1 for slot in slots], [[slot // size] for slot in slots]
    plan = AttentionPlan.build([1] * 4, lengths, tables, size)
    assert plan.slots.tolist() == slots
    kv_cpu.kv_write(*rows, *caches, plan)
    for cache, dim in zip(caches, dims, strict=True):
        assert cache.isfinite().sum() == len(slots) * heads * dim
    query = torch.randn(len(slots), heads, dims[0], generator=generator).to(dtype)
    found = cpu.paged_attention(query, *caches, plan, scale=1.0, window=1)
    assert torch.equal(found, rows[1])


@pytest.mark.parametrize(("size", "dim"), [(7, 8), (8, 7)])
def test_blocks_that_do_not_pair_are_left_to_the_reference(size, dim):
    rows = [torch.ones(1, 1, dim).bfloat16()] * 2
    caches = [torch.zeros(1, 1, size, dim).bfloat16() for _ in range(2)]
    plan = AttentionPlan.build([1], [1], [[0]], size)
    kv_write(*rows, *caches, plan)
    assert torch.equal(caches[0][0, 0, 0], rows[0][0, 0])
    assert torch.equal(paged_attention(rows[0], *caches, plan, scale=1.0), rows[1])
    assert not cpu.serves("cpu", torch.bfloat16, size, dim)


def test_it_agrees_with_the_reference():
    query, caches, plan, _ = make([(1, 100), (30, 77), (1, 1)])
    found = attend(query, caches, plan, scale=0.125)
    other = reference.paged_attention(query, *caches, plan, scale=0.125)
    torch.testing.assert_close(found, other, rtol=1e-5, atol=1e-6)


def test_no_tokens():
    query, caches, _, _ = make([(1, 1)])
    plan = AttentionPlan.build([], [], [], 8)
    assert attend(query[:0], caches, plan, scale=1.0).shape == (0, 6, 64)


def shared_naively(plan, tables):
    """The docstring's loop."""

    def used(index):
        return tables[index][: -(-plan.kv_lens[index] // plan.block_size)]

    prefixes = find_shared_prefixes(plan)
    blocks = [0] * len(prefixes.order)
    for i in range(1, len(prefixes.order)):
        a, b = used(prefixes.order[i - 1]), used(prefixes.order[i])
        while blocks[i] < min(len(a), len(b)) and a[blocks[i]] == b[blocks[i]]:
            blocks[i] += 1
    return SharedPrefixes(prefixes.order, tuple(blocks))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(1, 3)),
        min_size=0,
        max_size=8,
    )
)
def test_shared_prefixes_are_the_longest_between_neighbours(sequences):
    tables = [table for table, _ in sequences]
    lengths = [max(1, 3 * len(table) - spare) for table, spare in sequences]
    plan = AttentionPlan.build([1] * len(tables), lengths, tables, 3)
    found = find_shared_prefixes(plan)
    assert sorted(found.order) == list(range(len(tables)))
    assert found == shared_naively(plan, tables)
    for first in range(len(tables)):  # no pair shares more than the list says
        for second in range(first + 1, len(tables)):
            said = min(found.blocks[first + 1 : second + 1])
            a, b = (
                tables[found.order[i]][: -(-lengths[found.order[i]] // 3)] for i in (first, second)
            )
            assert a[:said] == b[:said]
            assert said == min(len(a), len(b)) or a[said : said + 1] != b[said : said + 1]


def test_the_example_of_shared_prefixes():
    tables = [[3, 1], [5, 2, 9], [5, 2, 7], [5, 4]]
    plan = AttentionPlan.build([1] * 4, [8, 12, 12, 8], tables, 4)
    assert plan.shared_prefixes == SharedPrefixes((0, 2, 1, 3), (0, 0, 2, 1))
