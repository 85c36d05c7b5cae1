"""Attention: decodes, shared prefixes, prompts and chunks of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.measure import (
    BLOCK_SIZE,
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    Machine,
    Run,
    in_turn,
    least,
    report,
)
from kernels.paged_attention import AttentionPlan, paged_attention
from kernels.paged_attention import reference as attention_reference


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
        work = case.read, 4 * pairs * HEADS * DIM
        floor, blocks = (each(*work) * LAYERS for each in (machine.floor, machine.floor_of_blocks))
        runs = {
            "ours": case.run(paged_attention),
            "reference": case.run(attention_reference.paged_attention),
        }
        if len(set(case.plan.query_lens)) == 1:
            runs["torch sdpa"] = case.sdpa()
        times = dict(zip(runs, least(rounds, list(runs.values()), cold=True), strict=True))
        report(name, floor, times, blocks)
