"""The CPU kernels beside torch's own ops and beside what the machine can do at most.

    python -m benchmarks.kernels.cpu [attention] [lora] [between] [linears] [sampling] ...

A floor is the larger of two times: bytes read and written over the machine's measured reading
rate, arithmetic over the rate of a large matrix product. Attention has a second one, at the rate
of reading blocks that lie anywhere in memory, as those of its cache do. Every operand comes from
memory: a case goes round as many layers' worth of it as the caches can't hold, and begins with
caches full of something else; but logits, which a step has just written, come from where they
are. Times are the least of all rounds, and the candidates take turns, so that a busy machine
disturbs all of them alike: compare ratios.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch

from benchmarks.kernels.attention import attention
from benchmarks.kernels.layers import between, low_rank, products
from benchmarks.kernels.measure import Machine, measure_machine
from benchmarks.kernels.sampling import sampling

PARTS: dict[str, Callable[[Machine, int], None]] = {
    "attention": attention,
    "lora": low_rank,
    "between": between,
    "linears": products,
    "sampling": sampling,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "parts",
        nargs="*",
        choices=[[], *PARTS],
        default=[],
        metavar="PART",
        help=f"any of {', '.join(PARTS)}; default: all",
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    with torch.inference_mode():
        machine = measure_machine(given.rounds)
        print(
            f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}, reads "
            f"{machine.bytes_per_second / 1e9:.1f} GB/s "
            f"({machine.block_bytes_per_second / 1e9:.1f} in blocks), multiplies "
            f"{machine.flops / 1e9:.0f} GFLOP/s (bfloat16)"
        )
        for part in given.parts or PARTS:
            PARTS[part](machine, given.rounds)


if __name__ == "__main__":
    main()
