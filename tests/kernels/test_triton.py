"""The Triton kernels: in Triton's interpreter against the loop in float64, or on a GPU."""

import inspect

import pytest
import torch

triton = pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

from kernels.kv_write import reference as kv_reference  # noqa: E402
from kernels.kv_write import triton_kernel as kv_triton  # noqa: E402
from kernels.paged_attention import AttentionPlan, reference  # noqa: E402
from kernels.paged_attention import triton_kernel as attention  # noqa: E402

EPSILON = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}
MIXED = [(1, 20), (6, 6), (3, 41), (1, 4), (16, 32), (1, 70), (1, 1)]
# shape, heads, key_dim, value_dim, block_size, dtype, window, softcap, sinks
QUICK = {
    "plain": (MIXED, (6, 2), 64, 64, 16, torch.float32, None, None, False),
    "bfloat16": (MIXED, (9, 3), 64, 64, 16, torch.bfloat16, None, None, False),
    "everything": (MIXED, (5, 1), 24, 12, 4, torch.float32, 7, 3.0, True),
    "window of one": ([(2, 40), (1, 33)], (4, 4), 80, 80, 16, torch.float32, 1, None, False),
}
SWEEP = {
    f"{dim}-{heads}-{dtype}-{window}-{softcap}-{sinks}": (
        [*MIXED, (70, 70), (1, 129)], heads, dim, value, 16, dtype, window, softcap, sinks,
    )
    for dim, value in [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]
    for heads in [(4, 4), (9, 3), (5, 1)]
    for dtype in EPSILON
    for window, softcap, sinks in [(None, None, False), (33, 5.0, True)]
}  # fmt: skip


def case(shape, heads, key_dim, value_dim, block_size, dtype, window, softcap, sinks):
    """(arguments, options, float64 result); every slot that nobody wrote holds NaN."""
    generator = torch.Generator().manual_seed(1)

    def random(*size):
        return torch.randn(*size, generator=generator).to(dtype)

    needed = [-(-length // block_size) for _, length in shape]
    order = torch.randperm(sum(needed) + 3, generator=generator).tolist()
    tables = [[order.pop() for _ in range(count)] for count in needed]
    lengths = [length for _, length in shape]
    caches = [
        torch.full((sum(needed) + 3, heads[1], block_size, dim), torch.nan, dtype=dtype)
        for dim in (key_dim, value_dim)
    ]
    keys = [random(length, heads[1], key_dim) for length in lengths]
    values = [random(length, heads[1], value_dim) for length in lengths]
    whole = AttentionPlan.build(lengths, lengths, tables, block_size)
    kv_reference.kv_write(torch.cat(keys), torch.cat(values), *caches, whole)
    counts = [count for count, _ in shape]
    plan = AttentionPlan.build(counts, lengths, tables, block_size, DEVICE)
    query = random(heads[0], sum(counts), key_dim).transpose(0, 1)
    options = {"scale": key_dim**-0.5, "window": window, "softcap": softcap}
    options["sinks"] = torch.randn(heads[0], generator=generator) if sinks else None
    expected = naive(query, keys, values, plan, **options)
    if sinks:
        options["sinks"] = options["sinks"].to(DEVICE)
    arguments = [query.to(DEVICE), *(cache.to(DEVICE) for cache in caches), plan]
    return arguments, options, expected, tables


def naive(query, keys, values, plan, scale, window, softcap, sinks):
    group = query.shape[1] // keys[0].shape[1]
    out = []
    for s, (count, length) in enumerate(zip(plan.query_lens, plan.kv_lens, strict=True)):
        q = query[plan.starts[s] : plan.starts[s + 1]].double().transpose(0, 1)
        k = keys[s].double().repeat_interleave(group, 1).permute(1, 2, 0)
        v = values[s].double().repeat_interleave(group, 1).transpose(0, 1)
        scores = q @ k * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        at = torch.arange(length - count, length)[:, None]
        hidden = (torch.arange(length) > at) | (torch.arange(length) <= at - (window or length))
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            column = sinks.double().view(-1, 1, 1).expand(-1, count, 1)
            scores = torch.cat([scores, column], 2)
        out.append((torch.softmax(scores, 2)[..., :length] @ v).transpose(0, 1))
    return torch.cat(out)


def check_attention(*parameters):
    arguments, options, expected, _ = case(*parameters)
    got = attention.paged_attention(*arguments, **options).cpu()
    assert got.dtype == arguments[0].dtype
    key_dim = arguments[0].shape[2]  # float32 scores are sums of so many rounded products
    bound = EPSILON[got.dtype] * (max(8, key_dim / 8) if got.dtype == torch.float32 else 1)
    torch.testing.assert_close(got.double(), expected, rtol=bound, atol=bound)
    definition = reference.paged_attention(*arguments, **options).cpu()
    torch.testing.assert_close(got.double(), definition.double(), rtol=2 * bound, atol=2 * bound)


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """Every output starts as NaN, so that a row that no program writes is seen."""
    fresh = torch.Tensor.new_empty

    def poisoned(self, *size, **options):
        made = fresh(self, *size, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


@pytest.mark.parametrize("parameters", QUICK.values(), ids=QUICK.keys())
def test_attention_equals_the_loop(parameters):
    check_attention(*parameters)


@pytest.mark.full
@pytest.mark.parametrize("parameters", SWEEP.values(), ids=SWEEP.keys())
def test_attention_equals_the_loop_in_all_shapes(parameters):
    check_attention(*parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_has_the_same_bits_alone_and_in_a_batch(dtype):
    parameters = (MIXED, (9, 3), 64, 64, 16, dtype, None, None, False)
    (query, *caches, plan), options, _, tables = case(*parameters)
    together = attention.paged_attention(query, *caches, plan, **options)
    for index, (count, length) in enumerate(MIXED):
        one = AttentionPlan.build([count], [length], [tables[index]], 16, DEVICE)
        rows = slice(plan.starts[index], plan.starts[index + 1])
        alone = attention.paged_attention(query[rows], *caches, one, **options)
        assert torch.equal(alone, together[rows])


def test_kv_write_equals_the_definition():
    plan = AttentionPlan.build([5, 1], [9, 33], [[4, 1, 3], [0, 2, 6, 7, 8, 5, 9, 10, 11]], 4)
    key = torch.randn(3, 6, 24).transpose(0, 1)  # the model's layout: not contiguous
    value = torch.randn(6, 3, 12)
    expected = [torch.full((12, 3, 4, dim), 7.0) for dim in (24, 12)]
    got = [cache.clone().to(DEVICE) for cache in expected]
    kv_reference.kv_write(key, value, *expected, plan)
    there = AttentionPlan.build(
        [5, 1], [9, 33], [[4, 1, 3], [0, 2, 6, 7, 8, 5, 9, 10, 11]], 4, DEVICE
    )
    kv_triton.kv_write(key.to(DEVICE), value.to(DEVICE), *got, there)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got, expected, strict=True))


def test_all_implementations_have_one_signature():
    for ours, theirs in [
        (attention.paged_attention, reference.paged_attention),
        (kv_triton.kv_write, kv_reference.kv_write),
    ]:
        assert inspect.signature(ours) == inspect.signature(theirs)
