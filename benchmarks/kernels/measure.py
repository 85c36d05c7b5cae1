"""What a machine can do, how long something takes, and a line about it."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kernels import native

READS = Path(__file__).with_name("reads.cpp")

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
BLOCK_SIZE = 16
LAYERS = 8
LORA_LAYERS = 30  # all of them: the adapters of eight layers would stay in a cache
RANKS = (8, 16, 32)

Run = Callable[[], object]


@dataclass(frozen=True)
class Machine:
    bytes_per_second: float  # of one array
    block_bytes_per_second: float  # of blocks of the KV cache, in any order
    flops: float

    def floor(self, nbytes: float, flops: float) -> float:
        return max(nbytes / self.bytes_per_second, flops / self.flops)

    def floor_of_blocks(self, nbytes: float, flops: float) -> float:
        return max(nbytes / self.block_bytes_per_second, flops / self.flops)


def least(rounds: int, runs: Sequence[Run], *, cold: bool = False) -> list[float]:
    """The shortest time of each, taking turns. `cold`: each begins with caches full of what nobody
    wrote; else it would also wait for the writing back of what the one before left in them."""
    best = [float("inf")] * len(runs)
    others = torch.ones(1 << 25, dtype=torch.int64) if cold else torch.ones(1)
    for number in range(rounds + 1):
        for index, run in enumerate(runs):
            others.sum()
            begin = time.perf_counter()
            run()
            seconds = time.perf_counter() - begin
            if number:
                best[index] = min(best[index], seconds)
    return best


def measure_machine(rounds: int) -> Machine:
    memory = torch.ones(1 << 25, dtype=torch.int64)
    square = torch.randn(2048, 2048).bfloat16()
    runs = [memory.sum, block_reads(memory), lambda: square @ square]
    read, blocks, product = least(rounds, runs)
    return Machine(memory.nbytes / read, memory.nbytes / blocks, 2 * 2048**3 / product)


def block_reads(memory: Tensor) -> Run:
    """Reads all of `memory`, a block of keys or values of every head at a time."""
    size = KV_HEADS * BLOCK_SIZE * DIM * 2
    order = torch.randperm(memory.nbytes // size)
    sums = torch.empty_like(order)
    library = native.library(READS)
    if library is None:
        raise SystemExit("the kernels' benchmark needs a C++ compiler")
    read, pointer, number = library.batten_read_blocks, ctypes.c_void_p, ctypes.c_int64
    read.argtypes = [pointer, pointer, number, number, ctypes.c_int, pointer]
    count, threads = len(order), torch.get_num_threads()
    return lambda: read(memory.data_ptr(), order.data_ptr(), count, size, threads, sums.data_ptr())


def report(case: str, floor: float, times: dict[str, float], blocks: float = 0) -> None:
    """`blocks` is a second floor: that of operands which lie in blocks."""
    ours = times["ours"]
    cells = "".join(
        f"{name} {seconds * 1e6:9.0f} us ({seconds / ours:5.2f} x ours)   "
        for name, seconds in times.items()
        if name != "ours"
    )
    in_blocks = f"= {ours / blocks:5.2f} x in blocks   " if blocks else ""
    print(
        f"{case:44} ours {ours * 1e6:8.0f} us = {ours / floor:5.2f} x floor "
        f"{floor * 1e6:7.0f} us   {in_blocks}{cells}",
        flush=True,
    )


def in_turn(count: int, run: Callable[[int], object]) -> Run:
    """`run` with each number below `count`."""

    def all_of_them() -> None:
        for index in range(count):
            run(index)

    return all_of_them
