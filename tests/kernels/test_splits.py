"""Which programs read which keys for which decoding rows."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.paged_attention.splits import SPLIT, plan_splits

BLOCK = 32
WIDTH = 5 * SPLIT // BLOCK


@st.composite
def batches(draw):
    """Rows that took over a prefix of blocks from an earlier row, or none."""
    lengths, tables, fresh = [], [], 0
    for row in range(draw(st.integers(1, 8))):
        table = list(range(fresh, fresh + WIDTH))
        fresh += WIDTH
        if row and draw(st.booleans()):
            shared = draw(st.integers(0, WIDTH))
            table[:shared] = tables[draw(st.integers(0, row - 1))][:shared]
        tables.append(table)
        lengths.append(draw(st.integers(1, 5 * SPLIT)))
    return np.array(lengths), np.array(tables)


@settings(max_examples=200, deadline=None)
@given(batches(), st.integers(1, 4), st.one_of(st.none(), st.integers(1, 6 * SPLIT)))
def test_every_row_sees_each_of_its_splits_once_in_order(batch, most, window):
    lengths, tables = batch
    plan = plan_splits(lengths, tables, BLOCK, most, window)
    seen = {}
    for source, split, rows, places in zip(
        plan.sources, plan.splits, plan.rows, plan.places, strict=True
    ):
        assert (rows >= 0).any()
        assert ((rows >= 0) == (places >= 0)).all()
        for row, place in zip(rows[rows >= 0], places[rows >= 0], strict=True):
            blocks = slice(
                split * SPLIT // BLOCK, -(-min((split + 1) * SPLIT, lengths[row]) // BLOCK)
            )
            assert (tables[row, blocks] == tables[source, blocks]).all()
            assert place not in seen
            seen[place] = (row, split)
    assert sorted(seen) == list(range(plan.offsets[-1]))
    for row, length in enumerate(lengths):
        first = 0 if window is None else max(0, length - window) // SPLIT
        mine = [seen[place] for place in range(plan.offsets[row], plan.offsets[row + 1])]
        assert mine == [(row, split) for split in range(first, -(-length // SPLIT))]


def test_a_shared_split_is_read_once_for_as_many_rows_as_a_tile_takes():
    shared = list(range(2 * SPLIT // BLOCK))
    tables = np.array([[*shared, 100 + row] for row in range(10)])
    plan = plan_splits(np.full(10, 2 * SPLIT + 1), tables, BLOCK, 8)
    tiles = [(split, (rows >= 0).sum()) for split, rows in zip(plan.splits, plan.rows, strict=True)]
    assert tiles[:4] == [(0, 8), (0, 2), (1, 8), (1, 2)]
    assert tiles[4:] == [(2, 1)] * 10


def test_nothing_to_decode_is_no_tile():
    plan = plan_splits(np.array([], dtype=int), np.zeros((0, 3), dtype=int), BLOCK, 4)
    assert len(plan.splits) == 0
    assert plan.offsets.tolist() == [0]


def test_equal_hashes_do_not_join_rows(monkeypatch):
    monkeypatch.setattr("kernels.paged_attention.splits._hashes", lambda keys: np.zeros(len(keys)))
    plan = plan_splits(np.full(3, SPLIT), np.array([[0] * 4, [1] * 4, [0] * 4]), BLOCK, 4)
    assert [rows[rows >= 0].tolist() for rows in plan.rows] == [[0, 2], [1]]
