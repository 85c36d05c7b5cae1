"""Blocks are found by everything their KV depends on, and given up in the right order."""

from __future__ import annotations

import pytest

from worker.engine.block_manager import BlockManager
from worker.engine.prefix_cache import PrefixCache
from worker.engine.sequence import Sequence
from worker.protocol.types import AdapterRef, RequestId, SamplingParams

SIZE = 4


def sequence(tokens: int | tuple[int, ...] = 12, **options: object) -> Sequence:
    prompt = tuple(range(tokens)) if isinstance(tokens, int) else tokens
    sampling = SamplingParams(max_tokens=4)
    return Sequence(RequestId("r"), 0, prompt, sampling, arrival=0, **options)


def pool(blocks: int = 16, **options: object) -> BlockManager:
    return BlockManager(blocks, SIZE, PrefixCache("revision", SIZE, **options))


def compute(blocks: BlockManager, one: Sequence, *, collisions: bool = False) -> None:
    """Run a prompt: what is cached is attached, the rest computed and published."""
    blocks.attach(one, blocks.match(one))
    assert blocks.grow(one, one.num_tokens)
    one.num_computed = one.num_tokens
    blocks.publish(one)
    if blocks.cache.enabled and not collisions:
        assert one.num_published == one.num_tokens // SIZE


def cached(blocks: BlockManager, **options: object) -> int:
    return len(blocks.match(sequence(16, **options)))


def test_full_blocks_only_and_never_the_last_token() -> None:
    blocks = pool()
    compute(blocks, sequence(11))
    assert len(blocks.match(sequence(11))) == 2
    compute(blocks, sequence(12))
    assert len(blocks.match(sequence(12))) == 2, "a token is left to compute"
    assert len(blocks.match(sequence(13))) == 3


def test_base_and_each_adapter_have_caches_of_their_own() -> None:
    blocks = pool()
    compute(blocks, sequence(12, adapter=AdapterRef("a", 8)))
    assert cached(blocks, adapter=AdapterRef("a", 8)) == 3
    assert cached(blocks, adapter=AdapterRef("b", 8)) == 0
    assert cached(blocks) == 0


def test_scopes_do_not_see_each_other() -> None:
    blocks = pool()
    compute(blocks, sequence(12, cache_scope="one"))
    assert cached(blocks, cache_scope="one") == 3
    assert cached(blocks, cache_scope="two") == 0
    assert cached(blocks) == 0


def test_a_shared_prefix_is_shared_as_far_as_its_whole_blocks() -> None:
    blocks = pool()
    compute(blocks, sequence(12, cache_scope="one", shared_tokens=6))
    assert cached(blocks, cache_scope="two", shared_tokens=6) == 1
    assert cached(blocks, cache_scope="one", shared_tokens=6) == 3
    assert cached(blocks, cache_scope="two", shared_tokens=0) == 0


def test_an_activated_adapter_uses_the_base_models_blocks_before_its_invocation() -> None:
    blocks = pool()
    compute(blocks, sequence(12))
    late = AdapterRef("late", 8)
    assert cached(blocks, adapter=late, adapter_start=8) == 2
    assert cached(blocks, adapter=late, adapter_start=7) == 1
    compute(blocks, sequence(12, adapter=late, adapter_start=6))
    assert cached(blocks, adapter=late, adapter_start=6) == 3
    assert cached(blocks) == 3, "the base model's blocks are still there"


def test_another_model_revision_finds_nothing() -> None:
    first, second = PrefixCache("one", SIZE), PrefixCache("two", SIZE)
    assert first.keys(sequence(), 3) != second.keys(sequence(), 3)


@pytest.mark.parametrize("collide", [lambda content: 7, lambda content: hash(content) % 2])
def test_collisions_cost_a_miss_and_never_serve_anothers_kv(collide: object) -> None:
    blocks = pool(64, hash_block=collide)
    held = []
    for number in range(6):
        one = sequence(tuple((token * 7 + number) % 5 for token in range(12)))
        content = {
            b: one.prompt_ids[: (i + 1) * SIZE]
            for one in held
            for i, b in enumerate(one.block_table)
        }
        for index, prefix in enumerate(blocks.match(one)):
            assert content[prefix.blocks[0]] == one.prompt_ids[: (index + 1) * SIZE]
        compute(blocks, one, collisions=True)
        held.append(one)
        blocks.check_integrity(held)
    for one in held:
        blocks.release(one)
    blocks.check_integrity([])


def test_the_least_recently_used_leaf_goes_first() -> None:
    blocks = pool(6)
    old, new = sequence(12), sequence((9,) * 12)
    compute(blocks, old)
    blocks.release(old)
    compute(blocks, new)
    blocks.release(new)
    asked = sequence((3,) * 5)
    blocks.grow(asked, 5)
    assert len(blocks.match(sequence(13))) == 1, "the old chain lost its last two blocks"
    assert len(blocks.match(sequence((9,) * 13))) == 3
    blocks.check_integrity([asked])


def test_use_makes_a_prefix_young_again() -> None:
    blocks = pool(6)
    for one in (sequence(12), sequence((9,) * 12), sequence(12)):
        compute(blocks, one)
        blocks.release(one)
    blocks.grow(sequence((3,) * 12), 12)
    assert len(blocks.match(sequence(13))) == 3
    assert len(blocks.match(sequence((9,) * 13))) == 0


def test_equal_blocks_computed_twice_become_one() -> None:
    blocks = pool()
    first, second = sequence(12), sequence(12)
    for one in (first, second):
        blocks.attach(one, [])
        blocks.grow(one, 12)
        one.num_computed = 12
    assert not set(first.block_table) & set(second.block_table)
    for one in (first, second):
        blocks.publish(one)
    assert first.block_table == second.block_table
    assert blocks.num_used == 3
    blocks.check_integrity([first, second])


def test_answers_are_found_like_prompts() -> None:
    blocks = pool()
    one = sequence(6)
    one.output_ids += [6, 7, 8]
    compute(blocks, one)
    assert len(blocks.match(sequence(9))) == 2


def test_distrusted_blocks_and_what_builds_on_them_are_forgotten() -> None:
    blocks = pool()
    bad, child = sequence(8), sequence(16)
    compute(blocks, bad)
    compute(blocks, child)
    gone = sequence(12)
    compute(blocks, gone)
    blocks.release(gone)
    blocks.release(bad, trusted=False)
    assert cached(blocks) == 0
    blocks.check_integrity([child])
    child.output_ids += [1] * 4
    blocks.grow(child, 20)
    child.num_computed = 20
    blocks.publish(child)
    assert len(blocks.cache) == 0, "its parents are not cached"
    blocks.release(child)
    blocks.check_integrity([])
    assert blocks.num_used == 0


def test_switched_off_it_finds_nothing() -> None:
    blocks = pool(enabled=False)
    one = sequence(12)
    compute(blocks, one)
    assert cached(blocks) == 0
    blocks.release(one)
    blocks.check_integrity([])
