"""The CPU kernels beside torch's own ops and beside what the machine can do at most.

    python benchmarks/kernels/cpu.py [attention] [lora] [linear] [--rounds 20] [--threads N]

A floor is the larger of two times: bytes read and written over the machine's measured reading
rate, arithmetic over the rate of a large matrix product. Every operand comes from memory: a case
goes round as many layers' worth of it as the caches can't hold. Times are the least of all rounds,
and the candidates take turns, so that a busy machine disturbs all of them alike: compare ratios.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.lora import LoraSegments, lora
from kernels.lora import reference as lora_reference
from kernels.paged_attention import AttentionPlan, paged_attention
from kernels.paged_attention import reference as attention_reference

HIDDEN, INNER, HEADS, KV_HEADS, DIM = 576, 1536, 9, 3, 64  # SmolLM2-135M
SHAPES = {  # its linears: (out, in)
    "q": (HEADS * DIM, HIDDEN),
    "k": (KV_HEADS * DIM, HIDDEN),
    "v": (KV_HEADS * DIM, HIDDEN),
    "o": (HIDDEN, HEADS * DIM),
    "gate": (INNER, HIDDEN),
    "up": (INNER, HIDDEN),
    "down": (HIDDEN, INNER),
}
BLOCK_SIZE = 8
LAYERS = 8
RANKS = (8, 16, 32)

Run = Callable[[], object]


@dataclass(frozen=True)
class Machine:
    bytes_per_second: float
    flops: float

    def floor(self, nbytes: float, flops: float) -> float:
        return max(nbytes / self.bytes_per_second, flops / self.flops)


def least(rounds: int, runs: Sequence[Run]) -> list[float]:
    """The shortest time of each, taking turns."""
    best = [float("inf")] * len(runs)
    for number in range(rounds + 1):
        for index, run in enumerate(runs):
            begin = time.perf_counter()
            run()
            seconds = time.perf_counter() - begin
            if number:
                best[index] = min(best[index], seconds)
    return best


def measure_machine(rounds: int) -> Machine:
    memory = torch.ones(1 << 25, dtype=torch.int64)
    square = torch.randn(2048, 2048).bfloat16()
    read, product = least(rounds, [memory.sum, lambda: square @ square])
    return Machine(memory.nbytes / read, 2 * 2048**3 / product)


def report(case: str, floor: float, times: dict[str, float]) -> None:
    ours = times["ours"]
    cells = "".join(
        f"{name} {seconds * 1e6:9.0f} us ({seconds / ours:5.2f} x ours)   "
        for name, seconds in times.items()
        if name != "ours"
    )
    print(
        f"{case:44} ours {ours * 1e6:8.0f} us = {ours / floor:5.2f} x floor "
        f"{floor * 1e6:7.0f} us   {cells}",
        flush=True,
    )


def in_turn(count: int, run: Callable[[int], object]) -> Run:
    """`run` with each number below `count`."""

    def all_of_them() -> None:
        for index in range(count):
            run(index)

    return all_of_them


@dataclass(frozen=True)
class Attention:
    """Sequences over `LAYERS` layers of cache."""

    query: Tensor
    caches: list[tuple[Tensor, Tensor]]
    plan: AttentionPlan
    read: int  # bytes of keys and values in one layer, shared blocks once

    @staticmethod
    def make(counts: list[int], lengths: list[int], shared: int, together: int) -> Attention:
        """The first `shared` tokens of each `together` sequences lie in the same blocks."""
        tables: list[list[int]] = []
        blocks = 0
        for index, length in enumerate(lengths):
            leads = index % together == 0
            first = [] if leads else tables[-1][: shared // BLOCK_SIZE]
            needed = -(-length // BLOCK_SIZE) - len(first)
            tables.append([*first, *range(blocks, blocks + needed)])
            blocks += needed
        order = torch.randperm(blocks).tolist()
        tables = [[order[block] for block in table] for table in tables]
        caches = [
            tuple(
                torch.randn(blocks, KV_HEADS, BLOCK_SIZE, DIM, dtype=torch.bfloat16)
                for _ in range(2)
            )
            for _ in range(LAYERS)
        ]
        return Attention(
            torch.randn(sum(counts), HEADS, DIM, dtype=torch.bfloat16),
            caches,
            AttentionPlan.build(counts, lengths, tables, BLOCK_SIZE),
            blocks * BLOCK_SIZE * KV_HEADS * DIM * 2 * 2,
        )

    def run(self, function: Callable[..., Tensor]) -> Run:
        return in_turn(
            LAYERS, lambda i: function(self.query, *self.caches[i], self.plan, scale=DIM**-0.5)
        )

    def sdpa(self) -> Run:
        """torch's own attention, given padded keys and values that nobody had to gather."""
        counts, lengths = self.plan.query_lens, self.plan.kv_lens
        longest, count = max(lengths), max(counts)
        queries = torch.randn(len(counts), HEADS, count, DIM, dtype=torch.bfloat16)
        padded = [
            torch.randn(len(lengths), KV_HEADS, longest, DIM, dtype=torch.bfloat16)
            for _ in range(2 * LAYERS)
        ]
        at = torch.arange(longest) - torch.tensor(lengths)[:, None, None]
        mask = (at < torch.arange(count)[:, None] - count + 1)[:, None]
        return in_turn(
            LAYERS,
            lambda i: F.scaled_dot_product_attention(
                queries, padded[2 * i], padded[2 * i + 1], attn_mask=mask, enable_gqa=True
            ),
        )


def attention(machine: Machine, rounds: int) -> None:
    torch.manual_seed(0)
    decodes = torch.randint(300, 401, (64,)).tolist()
    cases = {
        "decode 64 x 350": Attention.make([1] * 64, decodes, 0, 1),
        "decode 64 x 350, 230 shared by 14": Attention.make([1] * 64, decodes, 230, 14),
        "decode 4 x 4096": Attention.make([1] * 4, [4096] * 4, 0, 1),
        "prefill 4 x 128": Attention.make([128] * 4, [128] * 4, 0, 1),
        "prefill 512": Attention.make([512], [512], 0, 1),
        "chunk of 256 after 1792": Attention.make([256], [2048], 0, 1),
        "chunk of 128 after 384, and 32 x 350": Attention.make(
            [128, *[1] * 32], [512, *decodes[:32]], 0, 1
        ),
    }
    for name, case in cases.items():
        pairs = sum(
            count * length - count * (count - 1) // 2
            for count, length in zip(case.plan.query_lens, case.plan.kv_lens, strict=True)
        )
        floor = machine.floor(case.read, 4 * pairs * HEADS * DIM) * LAYERS
        runs = {
            "ours": case.run(paged_attention),
            "reference": case.run(attention_reference.paged_attention),
        }
        if len(set(case.plan.query_lens)) == 1:
            runs["torch sdpa"] = case.sdpa()
        report(name, floor, dict(zip(runs, least(rounds, list(runs.values())), strict=True)))


@dataclass(frozen=True)
class Linears:
    """All linears of `LAYERS` layers, with pools that hold eight adapters."""

    inputs: dict[int, Tensor]
    weights: list[Tensor]
    pools: list[tuple[str, Tensor, Tensor]]
    scales: Tensor
    outputs: dict[str, Tensor]

    @staticmethod
    def make(tokens: int, ranks: int) -> Linears:
        def random(*shape: int) -> Tensor:
            return torch.randn(*shape).bfloat16()

        names = list(SHAPES) * LAYERS
        return Linears(
            {width: random(tokens, width) for width in {width for _, width in SHAPES.values()}},
            [random(*SHAPES[name]) for name in names],
            [
                (name, random(ranks, SHAPES[name][1]), random(ranks, SHAPES[name][0]))
                for name in names
            ],
            torch.ones(ranks),
            {name: random(tokens, out) for name, (out, _) in SHAPES.items()},
        )

    def base(self) -> Run:
        def run(index: int) -> None:
            weight = self.weights[index]
            F.linear(self.inputs[weight.shape[1]], weight)

        return in_turn(len(self.weights), run)

    def update(self, function: Callable[..., None], segments: LoraSegments) -> Run:
        def run(index: int) -> None:
            name, a, b = self.pools[index]
            function(self.inputs[a.shape[1]], self.outputs[name], a, b, self.scales, segments)

        return in_turn(len(self.pools), run)


def low_rank(machine: Machine, rounds: int) -> None:
    torch.manual_seed(0)
    for tokens, adapters in ((64, 8), (64, 64), (8, 8), (512, 1), (512, 8)):
        ranks = [RANKS[index % len(RANKS)] for index in range(adapters)]
        ends = [sum(ranks[: index + 1]) for index in range(adapters)]
        rows = [range(end - rank, end) for end, rank in zip(ends, ranks, strict=True)]
        segments = LoraSegments.build(
            [(index, tokens // adapters) for index in range(adapters)], rows
        )
        linears = Linears.make(tokens, sum(ranks))
        widths = sum(out + width for out, width in SHAPES.values()) * LAYERS
        products = sum((stop - start) * len(own) for start, stop, own in segments.spans)
        outputs = sum(out for out, _ in SHAPES.values()) * LAYERS * tokens
        floor = machine.floor(2 * (sum(ranks) * widths + 2 * outputs), 2 * products * widths)
        runs = {
            "ours": linears.update(lora, segments),
            "reference": linears.update(lora_reference.lora, segments),
            "base linears": linears.base(),
        }
        times = dict(zip(runs, least(rounds, list(runs.values())), strict=True))
        report(f"LoRA {tokens} tokens, {adapters} adapters of rank 8 to 32", floor, times)


PARTS: dict[str, Callable[[Machine, int], None]] = {"attention": attention, "lora": low_rank}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    with torch.inference_mode():
        machine = measure_machine(given.rounds)
        print(
            f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}, reads "
            f"{machine.bytes_per_second / 1e9:.1f} GB/s, multiplies "
            f"{machine.flops / 1e9:.0f} GFLOP/s (bfloat16)"
        )
        for part in given.parts or PARTS:
            PARTS[part](machine, given.rounds)


if __name__ == "__main__":
    main()
