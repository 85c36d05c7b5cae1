"""Linears, low-rank updates, and what lies between them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.kernels.measure import (
    DIM,
    HEADS,
    HIDDEN,
    INNER,
    LAYERS,
    LORA_LAYERS,
    RANKS,
    SHAPES,
    Machine,
    Run,
    in_turn,
    least,
    report,
)
from kernels import pointwise
from kernels.lora import LoraPool, LoraSegments, lora
from kernels.lora import reference as lora_reference
from kernels.pointwise import reference as pointwise_reference
from worker.engine.packed_linear import pack, packable

GROUPS = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
"""Modules that share their input: the engine changes their outputs in one call."""


@dataclass(frozen=True)
class Linears:
    """All linears of `LORA_LAYERS` layers, with pools that hold the adapters of a step."""

    inputs: dict[int, Tensor]
    weights: list[Tensor]
    pools: list[list[LoraPool]]  # by layer and group
    outputs: list[list[Tensor]]  # by group

    @staticmethod
    def make(tokens: int, ranks: int) -> Linears:
        def random(*shape: int) -> Tensor:
            return torch.randn(*shape).bfloat16()

        def pool(name: str) -> LoraPool:
            out, width = SHAPES[name]
            return LoraPool(random(ranks, width), random(ranks, out), torch.ones(ranks))

        return Linears(
            {width: random(tokens, width) for width in {width for _, width in SHAPES.values()}},
            [random(*shape) for _ in range(LORA_LAYERS) for shape in SHAPES.values()],
            [[pool(name) for name in group] for _ in range(LORA_LAYERS) for group in GROUPS],
            [[random(tokens, SHAPES[name][0]) for name in group] for group in GROUPS],
        )

    def base(self) -> Run:
        def run(index: int) -> None:
            weight = self.weights[index]
            F.linear(self.inputs[weight.shape[1]], weight)

        return in_turn(len(self.weights), run)

    def update(self, function: Callable[..., None], segments: LoraSegments) -> Run:
        def run(index: int) -> None:
            pools = self.pools[index]
            outputs = self.outputs[index % len(GROUPS)]
            function(self.inputs[pools[0].width], outputs, pools, segments)

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
        widths = sum(out + width for out, width in SHAPES.values()) * LORA_LAYERS
        products = sum((stop - start) * len(own) for start, stop, own in segments.spans)
        floor = machine.floor(2 * sum(ranks) * widths, 2 * products * widths)
        runs = {
            "ours": linears.update(lora, segments),
            "reference": linears.update(lora_reference.lora, segments),
            "base linears": linears.base(),
        }
        times = dict(zip(runs, least(rounds, list(runs.values()), cold=True), strict=True))
        report(f"LoRA {tokens} tokens, {adapters} adapters of rank 8 to 32", floor, times)


def repeated(function: Callable[..., Tensor], arguments: tuple[object, ...]) -> Run:
    return in_turn(LAYERS, lambda _: function(*arguments))


def between(machine: Machine, rounds: int) -> None:
    """What lies between the products, for all layers of the model."""
    torch.manual_seed(0)
    for tokens in (8, 64, 512):
        x = torch.randn(tokens, HIDDEN).bfloat16()
        weight = torch.randn(HIDDEN).bfloat16()
        gate, up = (torch.randn(tokens, INNER).bfloat16() for _ in range(2))
        queries = torch.randn(tokens, HEADS, DIM).bfloat16()
        cos, sin = (torch.randn(tokens, DIM).bfloat16() for _ in range(2))

        for name, nbytes, arguments in (
            ("rms_norm", 4 * x.numel(), (x, weight, 1e-5)),
            ("gated_silu", 6 * gate.numel(), (gate, up)),
            ("rotate", 4 * queries.numel(), (queries, cos, sin)),
        ):
            runs = {
                "ours": repeated(getattr(pointwise, name), arguments),
                "reference": repeated(getattr(pointwise_reference, name), arguments),
            }
            times = dict(zip(runs, least(rounds, list(runs.values())), strict=True))
            report(f"{name} {tokens} tokens", machine.floor(nbytes * LAYERS, 0), times)


def products(machine: Machine, rounds: int) -> None:
    """One layer's linears as torch multiplies them, and with weights reordered beforehand."""
    torch.manual_seed(0)
    for tokens in (1, 8, 64, 512):
        model = nn.ModuleList(
            nn.Linear(width, out, bias=False)
            for _ in range(LAYERS)
            for out, width in SHAPES.values()
        )
        plain = [layer.bfloat16() for layer in model]
        packed = copy.deepcopy(model)
        pack(packable(packed))
        x = {width: torch.randn(tokens, width).bfloat16() for _, width in SHAPES.values()}
        sizes = sum(out * width for out, width in SHAPES.values()) * LAYERS

        def over(layers: Sequence[nn.Module], x: dict[int, Tensor] = x) -> Run:
            return in_turn(len(layers), lambda i: layers[i](x[layers[i].in_features]))  # type: ignore[index]

        runs = {"ours": over(list(packed)), "torch": over(plain)}
        times = dict(zip(runs, least(rounds, list(runs.values()), cold=True), strict=True))
        report(f"linears {tokens} tokens", machine.floor(2 * sizes, 2 * tokens * sizes), times)
