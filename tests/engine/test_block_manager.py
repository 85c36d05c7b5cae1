"""Blocks are counted, given out and taken back; the check finds every kind of mistake."""

from __future__ import annotations

import pytest

from worker.engine.block_manager import BlockManager
from worker.engine.prefix_cache import PrefixCache
from worker.engine.sequence import Sequence
from worker.protocol.types import RequestId, SamplingParams


def pool(blocks: int = 8) -> BlockManager:
    return BlockManager(blocks, 4, PrefixCache("revision", 4))


def sequence(*prompt: int) -> Sequence:
    return Sequence(RequestId("r"), 0, prompt, SamplingParams(max_tokens=4), arrival=0)


def test_tables_grow_by_whole_blocks_and_only_when_needed() -> None:
    blocks, one = pool(), sequence(*range(20))
    for tokens, held in ((1, 1), (4, 1), (5, 2), (13, 4)):
        assert blocks.grow(one, tokens)
        assert len(one.block_table) == held == blocks.num_used
    blocks.check_integrity([one])


def test_what_cannot_grow_stays_as_it_is() -> None:
    blocks, one, two = pool(3), sequence(*range(8)), sequence(*range(8))
    assert blocks.grow(one, 8)
    assert not blocks.grow(two, 8)
    assert (two.block_table, blocks.num_free) == ([], 1)
    assert blocks.grow(two, 4)
    blocks.check_integrity([one, two])


def test_a_shared_block_lives_until_its_last_holder_leaves() -> None:
    blocks, one, two = pool(), sequence(*range(8)), sequence(*range(9))
    blocks.grow(one, 8)
    one.num_computed = 8
    blocks.publish(one)
    blocks.attach(two, blocks.match(two))
    assert two.block_table == one.block_table
    blocks.release(one)
    assert blocks.num_used == 2
    blocks.check_integrity([two])
    blocks.release(two)
    assert (blocks.num_used, blocks.num_free, len(blocks.cache)) == (0, 8, 2)
    blocks.check_integrity([])


def test_cached_blocks_are_taken_only_when_no_empty_one_is_left() -> None:
    blocks, one = pool(4), sequence(*range(8))
    blocks.grow(one, 8)
    one.num_computed = 8
    blocks.publish(one)
    blocks.release(one)
    two = sequence(*[9] * 16)
    assert blocks.grow(two, 8)
    assert (blocks.evictions, len(blocks.cache)) == (0, 2)
    assert blocks.grow(two, 16)
    assert (blocks.evictions, len(blocks.cache)) == (2, 0)


def test_partial_blocks_are_not_kept() -> None:
    blocks, one = pool(), sequence(*range(7))
    blocks.grow(one, 7)
    one.num_computed = 7
    blocks.publish(one)
    blocks.release(one)
    assert len(blocks.cache) == 1


@pytest.mark.parametrize("damage", ["lost", "shared", "freed", "unused"])
def test_the_check_finds_damage(damage: str) -> None:
    blocks, one = pool(), sequence(*range(8))
    blocks.grow(one, 8)
    one.num_computed = 8
    blocks.publish(one)
    if damage == "lost":
        one.block_table.pop()
    elif damage == "shared":
        one.block_table[0] = one.block_table[1]
    elif damage == "freed":
        blocks._free.append(one.block_table[0])
    else:
        blocks.cache.unuse(one.block_table[1])
    with pytest.raises(AssertionError):
        blocks.check_integrity([one])
