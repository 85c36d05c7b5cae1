"""Finds the KV of a prefix by its content.

A block's key is a hash chained over everything its keys and values depend on: the model
revision, the adapter (none before an activated LoRA's invocation), the cache scope, and all
tokens up to its end. A hash only proposes: a hit is taken when the stored tokens, namespace and
parent are equal, so that a collision costs a miss and never serves another's KV.

    root ── block 0 ── block 1 ── block 2          used by running sequences
                 └──── block 1' ── block 2'        unused: kept until its memory is needed

A sequence that uses a block uses all blocks above it, and gives them back from the deepest up.
So among unused blocks, ordered by when they became unused, a child always stands before its
parent: the first one is the least recently used leaf, found without search.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from worker.engine.sequence import Sequence

Namespace = tuple[str, str | None]
"""Adapter digest ("" for the base model) and cache scope (None: shared by all)."""


@dataclass(frozen=True, slots=True, eq=False)
class CachedBlock:
    block: int
    key: int
    parent: CachedBlock | None
    namespace: Namespace
    tokens: tuple[int, ...]


class PrefixCache:
    """Index of full, computed blocks, and the order in which unused ones are given up.

    It holds no reference counts: the block manager says when a block is used and unused.
    `hash_block` may be replaced to provoke collisions.
    """

    def __init__(
        self,
        model_revision: str,
        block_size: int,
        *,
        enabled: bool = True,
        hash_block: Callable[[object], int] = hash,
    ) -> None:
        self.block_size = block_size
        self.enabled = enabled
        self._hash = hash_block
        self._root = hash_block(model_revision)
        self._by_key: dict[int, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        self._unused: OrderedDict[int, CachedBlock] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_block)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    @property
    def num_unused(self) -> int:
        return len(self._unused)

    def keys(self, sequence: Sequence, count: int) -> list[int]:
        """Chained keys of (at least) the first `count` full blocks, remembered on the sequence."""
        keys = sequence.block_keys
        while len(keys) < count:
            index = len(keys)
            parent = keys[-1] if keys else self._root
            content = (parent, self._namespace(sequence, index), self._tokens(sequence, index))
            keys.append(self._hash(content))
        return keys

    def match(self, sequence: Sequence, most: int) -> list[int]:
        """The longest run of leading blocks, at most `most`, that are cached."""
        found: list[int] = []
        parent: CachedBlock | None = None
        for index in range(most if self.enabled else 0):
            cached = self._by_key.get(self.keys(sequence, index + 1)[index])
            if cached is None or not self._verify(cached, parent, sequence, index):
                break
            found.append(cached.block)
            parent = cached
        return found

    def publish(self, sequence: Sequence, index: int) -> int | None:
        """Make the sequence's computed block `index` findable.

        Returns the block that now stands for this content: its own, or an equal one that was
        there before. None when it cannot be cached (a collision, or its parent is not cached).
        """
        block = sequence.block_table[index]
        parent = self._by_block.get(sequence.block_table[index - 1]) if index else None
        if not self.enabled or (index and parent is None):
            return None
        key = self.keys(sequence, index + 1)[index]
        cached = self._by_key.get(key)
        if cached is not None:
            return cached.block if self._verify(cached, parent, sequence, index) else None
        content = self._namespace(sequence, index), self._tokens(sequence, index)
        cached = CachedBlock(block, key, parent, *content)
        self._by_key[key] = self._by_block[block] = cached
        return block

    def use(self, block: int) -> None:
        """A sequence holds it: it is not given up."""
        self._unused.pop(block, None)

    def unuse(self, block: int) -> None:
        """No sequence holds it any more. Call for deeper blocks first."""
        self._unused[block] = self._by_block[block]

    def evict(self) -> int:
        """Give up the least recently used leaf. Raises KeyError when every block is used."""
        block, cached = self._unused.popitem(last=False)
        self._drop(cached)
        return block

    def purge(self, blocks: Iterable[int]) -> list[int]:
        """Forget these blocks and all that build on them (their content cannot be trusted).

        Returns those that were unused. Takes a look at every cached block: for errors only.
        """
        doomed = {id(self._by_block[b]) for b in blocks if b in self._by_block}
        waiting = [cached for cached in self._by_block.values() if id(cached) not in doomed]
        while extra := {id(c) for c in waiting if c.parent and id(c.parent) in doomed} - doomed:
            doomed |= extra
        gone = [cached for cached in self._by_block.values() if id(cached) in doomed]
        for cached in gone:
            self._drop(cached)
        return [c.block for c in gone if self._unused.pop(c.block, None) is not None]

    def check_integrity(self, is_used: Callable[[int], bool]) -> None:
        """Raises AssertionError when the index contradicts itself or the users of its blocks."""
        position = {block: place for place, block in enumerate(self._unused)}
        for block, cached in self._by_block.items():
            assert cached.block == block, f"block {block} is filed under another"
            assert self._by_key[cached.key] is cached, f"block {block} has lost its key"
            assert is_used(block) != (block in self._unused), f"block {block}: used and unused"
            parent = cached.parent
            if parent is None:
                continue
            assert self._by_block.get(parent.block) is parent, f"parent of block {block} is gone"
            if parent.block in position:
                assert position[block] < position[parent.block], "a parent would go first"
        assert len(self._by_key) == len(self._by_block), "keys and blocks differ in number"

    def _drop(self, cached: CachedBlock) -> None:
        del self._by_key[cached.key]
        del self._by_block[cached.block]

    def _verify(
        self, cached: CachedBlock, parent: CachedBlock | None, sequence: Sequence, index: int
    ) -> bool:
        return (
            cached.parent is parent
            and cached.namespace == self._namespace(sequence, index)
            and cached.tokens == self._tokens(sequence, index)
        )

    def _namespace(self, sequence: Sequence, index: int) -> Namespace:
        stop = (index + 1) * self.block_size
        adapter = sequence.adapter_at(stop - 1)
        return (
            adapter.digest if adapter else "",
            None if stop <= sequence.shared_tokens else sequence.cache_scope,
        )

    def _tokens(self, sequence: Sequence, index: int) -> tuple[int, ...]:
        start = index * self.block_size
        stop = start + self.block_size
        if stop <= len(sequence.prompt_ids):
            return sequence.prompt_ids[start:stop]
        return tuple(sequence.tokens(start, stop))
