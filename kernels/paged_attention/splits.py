"""How decoding rows divide their keys among programs: by position, and together where they can.

Every row's keys are cut at multiples of SPLIT positions. Rows whose block tables agree on a whole
split form one tile, which reads that split's keys and values once; prefixes that only some of the
rows share, of any length and nested in any way, need nothing more. A row's splits depend on its
own length alone, so its sums have the same terms in the same order whoever shares them.

Sharing one prefix read among sequences: Hydragen (Juravsky et al., 2024) and ChunkAttention (Ye et
al., 2024); splits merged by log-sum-exp: FlashDecoding (Dao et al., 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SPLIT = 128  # positions

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class SplitPlan:
    """Example: rows of 300 and 200 keys that share their first block of 128, two rows a tile.

    sources   [0, 0, 0, 1]            whose block table a tile reads
    splits    [0, 1, 2, 1]            which split of it
    rows      [[0, 1], [0, -1], [0, -1], [1, -1]]
    places    [[0, 3], [1, -1], [2, -1], [4, -1]]     where each row's partial sums go
    offsets   [0, 3, 5]               row r's partial sums are offsets[r] to offsets[r + 1]
    """

    sources: Ints
    splits: Ints
    rows: Ints
    places: Ints
    offsets: Ints


def plan_splits(
    lengths: Ints, tables: Ints, block_size: int, most: int, window: int | None = None
) -> SplitPlan:
    """Tiles of at most `most` rows, for rows that see all of their `lengths` keys or, of those,
    the last `window`.

    `tables` is int64 [rows, most blocks]. Nothing is shared where `block_size` does not divide
    SPLIT.
    """
    first = np.maximum(lengths - (window or lengths.max(initial=0)), 0) // SPLIT
    counts = -(-lengths // SPLIT) - first
    offsets = np.concatenate([[0], np.cumsum(counts)])
    row = np.repeat(np.arange(len(lengths)), counts)
    split = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - first, counts)
    group = _groups(row, split, lengths, tables, block_size)
    order = np.lexsort((row, group))
    place_in_group = np.arange(len(order)) - np.searchsorted(group[order], group[order])
    lane = place_in_group % most
    tile = np.cumsum(lane == 0) - 1
    starts = order[lane == 0]
    rows = np.full((len(starts), most), -1)
    places = np.full((len(starts), most), -1)
    rows[tile, lane] = row[order]
    places[tile, lane] = order
    return SplitPlan(row[starts], split[starts], rows, places, offsets)


def _groups(row: Ints, split: Ints, lengths: Ints, tables: Ints, block_size: int) -> Ints:
    """One number for each (row, split): equal where a whole split lies in the same blocks."""
    own = np.arange(len(row))
    whole = own[(split + 1) * SPLIT <= lengths[row]]
    width = SPLIT // block_size
    if not len(whole) or width * block_size != SPLIT:
        return own
    columns = split[whole, None] * width + np.arange(width)
    keys = np.column_stack([split[whole], tables[row[whole, None], columns]])
    _, leaders, members = np.unique(_hashes(keys), return_index=True, return_inverse=True)
    leader = leaders[members.reshape(-1)]
    same = (keys == keys[leader]).all(1)
    group = own.copy()
    group[whole[same]] = whole[leader[same]]
    return group


def _hashes(keys: Ints) -> NDArray[np.uint64]:
    """A number for each row of `keys`; unequal rows seldom have the same."""
    odd = np.random.default_rng(0).integers(2**63, size=keys.shape[1], dtype=np.uint64) * 2 + 1
    hashes: NDArray[np.uint64] = ((keys.astype(np.uint64) + np.uint64(1)) * odd).sum(1)
    return hashes
