"""Which sequences of a step begin with the same blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels.paged_attention import AttentionPlan


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Sequences in an order in which those that share leading blocks are neighbours.

    Semantics:
        order     every sequence once
        blocks[i] = 0                                                       for i = 0, else
                    longest n with tables[order[i - 1]][:n] == tables[order[i]][:n]
        where tables[s] = plan.block_tables[s, : blocks that hold plan.kv_lens[s] tokens]

    Any two sequences order[i] and order[j], i < j, share min(blocks[i + 1 : j + 1]) blocks: one
    list describes groups within groups. A group's shared blocks need to be read only once.

    Example: tables [[3, 1], [5, 2, 9], [5, 2, 7], [5, 4]]

        order   (0, 2, 1, 3)
        blocks  (0, 0, 2, 1)
    """

    order: tuple[int, ...]
    blocks: tuple[int, ...]


def find_shared_prefixes(plan: AttentionPlan) -> SharedPrefixes:
    """Cost: sorting the block tables."""
    tables = plan.block_tables.cpu()
    if len(tables) < 2:
        return SharedPrefixes(tuple(range(len(tables))), (0,) * len(tables))
    lengths = [-(-length // plan.block_size) for length in plan.kv_lens]
    rows = tables.numpy().astype(">i8")  # whose bytes are in the numbers' order
    keys = [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    used = [lengths[index] for index in order]
    ordered = tables[order]
    equal = (ordered[1:] == ordered[:-1]).long().cumprod(1).sum(1).tolist()
    shared = [min(*counts) for counts in zip(equal, used[1:], used[:-1], strict=True)]
    return SharedPrefixes(tuple(order), (0, *shared))
