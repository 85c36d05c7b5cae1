"""One program samples one row, without sorting it.

Weights are exp((logit - highest) / temperature), so at most 1, and compare as their bits do. The
lowest weight that a filter keeps is found two bits at a time, most significant first: each pass
over the row counts (top-k) or sums (top-p) what lies above three candidates. Sums are float64 in
an order that the vocabulary's size alone decides.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sample import SamplingPlan
from kernels.sample.reference import logprobs

__all__ = ["logprobs", "sample"]

BLOCK = 4096  # columns of one turn
WARPS = 8
PASSES = tl.constexpr(15)  # the bits of 1.0 and below, two at a time


@triton.jit  # type: ignore[untyped-decorator]
def _weights(
    row: tl.tensor,
    start: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """float32 [BLOCK]; -1 past the vocabulary's end, which no filter keeps."""
    at = start + tl.arange(0, BLOCK)
    logits = tl.load(row + at, mask=at < VOCABULARY, other=float("-inf"))
    return tl.where(at < VOCABULARY, tl.exp((logits - highest) / temperature), -1.0)


@triton.jit  # type: ignore[untyped-decorator]
def _mass(weights: tl.tensor, floor: tl.tensor, COUNT: tl.constexpr) -> tl.tensor:
    """How many weights, or how much weight, is at least `floor`: float64."""
    kept = weights >= floor
    if COUNT:
        return tl.sum(kept.to(tl.int32), 0).to(tl.float64)
    return tl.sum(tl.where(kept, weights, 0.0).to(tl.float64), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _raise_floor(
    row: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    floor: tl.tensor,
    wanted: tl.tensor,
    COUNT: tl.constexpr,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The highest float32 number, `floor` or above, such that the weights of at least it have a
    mass of at least `wanted`; `floor` itself when there is none."""
    bits = tl.full([], 0, tl.int32)
    for step in range(PASSES):
        digit = 1 << (28 - 2 * step)
        low = tl.maximum((bits + digit).to(tl.float32, bitcast=True), floor)
        middle = tl.maximum((bits + 2 * digit).to(tl.float32, bitcast=True), floor)
        high = tl.maximum((bits + 3 * digit).to(tl.float32, bitcast=True), floor)
        above_low = tl.full([], 0.0, tl.float64)
        above_middle = tl.full([], 0.0, tl.float64)
        above_high = tl.full([], 0.0, tl.float64)
        for start in range(0, VOCABULARY, BLOCK):
            weights = _weights(row, start, highest, temperature, VOCABULARY, BLOCK)
            above_low += _mass(weights, low, COUNT)
            above_middle += _mass(weights, middle, COUNT)
            above_high += _mass(weights, high, COUNT)
        steps = (
            (above_low >= wanted).to(tl.int32)
            + (above_middle >= wanted).to(tl.int32)
            + (above_high >= wanted).to(tl.int32)
        )
        bits += steps * digit
    return tl.maximum(bits.to(tl.float32, bitcast=True), floor)


@triton.jit  # type: ignore[untyped-decorator]
def sample_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    uniforms: tl.tensor,
    chosen: tl.tensor,
    row_stride: tl.tensor,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid [rows]."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * row_stride
    highest = tl.full([], float("-inf"), tl.float32)
    best = tl.full([], 0, tl.int32)
    nans = tl.full([], 0, tl.int32)
    for start in range(0, VOCABULARY, BLOCK):
        at = start + tl.arange(0, BLOCK)
        block = tl.load(row + at, mask=at < VOCABULARY, other=float("-inf"))
        nans += tl.sum((block != block).to(tl.int32), 0)
        top = tl.max(block, 0)
        first = tl.min(tl.where(block == top, at, VOCABULARY), 0)
        best = tl.where(top > highest, first, best)
        highest = tl.maximum(highest, top)
    temperature = tl.load(temperatures + index)
    if (nans > 0) | (tl.abs(highest) == float("inf")):
        best = tl.full([], -1, tl.int32)
    elif temperature > 0:
        # 1e-30 is as good as greedy, and no quotient overflows or is infinity by infinity
        temperature = tl.minimum(tl.maximum(temperature, 1e-30), 1e30)
        floor = tl.load(min_ps + index).to(tl.float32)
        top_k = tl.load(top_ks + index)
        if top_k > 0:
            floor = _raise_floor(
                row, highest, temperature, floor, top_k.to(tl.float64), True, VOCABULARY, BLOCK
            )
        top_p = tl.load(top_ps + index)
        if top_p < 1:
            mass = tl.full([], 0.0, tl.float64)
            for start in range(0, VOCABULARY, BLOCK):
                weights = _weights(row, start, highest, temperature, VOCABULARY, BLOCK)
                mass += _mass(weights, floor, False)
            floor = _raise_floor(
                row, highest, temperature, floor, top_p * mass, False, VOCABULARY, BLOCK
            )
        mass = tl.full([], 0.0, tl.float64)
        for start in range(0, VOCABULARY, BLOCK):
            weights = _weights(row, start, highest, temperature, VOCABULARY, BLOCK)
            mass += _mass(weights, floor, False)
        target = tl.load(uniforms + index) * mass
        passed = tl.full([], 0.0, tl.float64)
        best = tl.full([], VOCABULARY, tl.int32)
        last = tl.full([], 0, tl.int32)
        for start in range(0, VOCABULARY, BLOCK):
            at = start + tl.arange(0, BLOCK)
            weights = _weights(row, start, highest, temperature, VOCABULARY, BLOCK)
            kept = weights >= floor
            cumulative = passed + tl.cumsum(tl.where(kept, weights, 0.0).to(tl.float64), 0)
            reached = kept & (weights > 0) & (cumulative > target)
            best = tl.minimum(best, tl.min(tl.where(reached, at, VOCABULARY), 0))
            last = tl.maximum(last, tl.max(tl.where(kept & (weights > 0), at, 0), 0))
            passed += _mass(weights, floor, False)
        best = tl.minimum(best, last)  # the sums of a block may round apart from its total
    tl.store(chosen + index, best.to(tl.int64))


def sample(logits: Tensor, plan: SamplingPlan) -> Tensor:
    """See `kernels.sample.sample`."""
    rows, vocabulary = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    chosen = logits.new_empty(rows, dtype=torch.int64)
    if rows:
        sample_kernel[(rows,)](
            logits,
            plan.temperatures,
            plan.top_ks,
            plan.top_ps,
            plan.min_ps,
            plan.uniforms,
            chosen,
            logits.stride(0),
            VOCABULARY=vocabulary,
            BLOCK=min(BLOCK, triton.next_power_of_2(vocabulary)),
            num_warps=WARPS,
        )
    return chosen
