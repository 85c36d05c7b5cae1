"""What a machine can do, how long something takes, and a line about it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

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
LORA_LAYERS = 30  # all of them: the adapters of eight layers would stay in a cache
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
