"""Adapters of many ranks in one pool, tokens that use them, and the LoRA op's loop in float64."""

import torch

from kernels.lora import LoraPool, LoraSegments

POOL = 420
RANKS = (1, 8, 64, 256, 3, 16, 4)
SMALLER = 5  # an adapter that this module gives fewer rows
BIAS_ONLY = 6  # and one that it gives none

ROWS = []
_rows = torch.randperm(POOL, generator=torch.Generator().manual_seed(1)).tolist()
for _rank in RANKS:
    ROWS.append(tuple(_rows.pop() for _ in range(_rank)))
ROWS.append(())

RUNS = {
    "all base": [(-1, 5)],
    "one token": [(0, 1)],
    "mixed ranks": [(-1, 3), (0, 2), (1, 5), (2, 1), (3, 4), (4, 7), (5, 33), (6, 9), (-1, 1)],
    "one adapter": [(1, 40)],
    "as many adapters as tokens": [(index, 1) for index in range(7)],
    "base between": [(5, 3), (-1, 4), (4, 2), (7, 2), (6, 1)],
}
POISON = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def make(runs, width, out, dtype, *, affine=True, seed=0, device="cpu"):
    """x, y, pool, segments. What no span uses is NaN."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator).to(dtype)

    segments = LoraSegments.build(runs, ROWS)
    x, y = random(segments.num_tokens, width), random(segments.num_tokens, out)
    A, B = random(POOL, width) / width**0.5, random(POOL, out)
    scales = torch.rand(POOL, generator=generator) * 2
    unused = sorted(set(range(POOL)) - segments.rows)
    A[unused] = B[unused] = scales[unused] = torch.nan
    for adapter, rank in ((SMALLER, 5), (BIAS_ONLY, 0)):
        left = list(ROWS[adapter][rank:])
        A[left] = B[left] = scales[left] = 0
    y[~adapted(segments)] = torch.nan
    pool = LoraPool(A.to(device), B.to(device), scales.to(device))
    if affine:
        for index, rows in enumerate(ROWS[:-1]):
            gain, shift = (random(out, dtype=torch.float32).to(device) for _ in range(2))
            pool.put(rows[0], gain if index % 3 else None, shift if index % 2 == 0 else None)
    return x.to(device), y.to(device), pool, segments


def adapted(segments):
    """bool [tokens]: whether a token is in a span of any rows."""
    found = torch.zeros(segments.num_tokens, dtype=torch.bool)
    for start, stop, rows in segments.spans:
        found[start:stop] = bool(rows)
    return found


def expected(x, y, pool, segments):
    """float64: the outputs, and the magnitudes that the products with A, and with B, add up to."""
    out = y.double().clone()
    inner, outer = torch.zeros_like(out), out.abs()
    for start, stop, rows in segments.spans:
        if not rows:
            continue
        own, span = list(rows), slice(start, stop)
        a, b, scales = (t[own].double() for t in (pool.A, pool.B, pool.scales))
        gain, shift = (None if t is None else t.double() for t in pool.affine(rows[0]))
        hidden = x[span].double() @ a.t() * scales
        out[span] += hidden @ b
        inner[span] += (x[span].double().abs() @ a.abs().t() * scales) @ b.abs()
        outer[span] += hidden.abs() @ b.abs()
        if gain is not None:
            for tensor, factor in ((out, gain), (inner, gain.abs()), (outer, gain.abs())):
                tensor[span] *= factor
        if shift is not None:
            out[span] += shift
            outer[span] += shift.abs()
    return out, inner, outer


def same_bits(a, b):
    return torch.equal(a.view(POISON[a.dtype]), b.view(POISON[b.dtype]))


def check_shared_as_apart(lora, cases):
    """Modules that share the input of the first case have the bits that they have apart."""
    (x, _, _, segments), pools = cases[0], [pool for _, _, pool, _ in cases]
    together, apart = ([y.clone() for _, y, _, _ in cases] for _ in range(2))
    lora(x, together, pools, segments)
    for y, pool in zip(apart, pools, strict=True):
        lora(x, [y], [pool], segments)
    assert all(same_bits(*pair) for pair in zip(together, apart, strict=True))
