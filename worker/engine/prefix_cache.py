"""Finds the KV of a prefix by its content.

A prefix's key is a hash chained over everything its keys and values depend on: the model
revision, the adapter (none before an activated LoRA's invocation), the cache scope, and all
tokens up to its end. A hash only proposes: a hit is taken when the stored tokens, namespace and
parent are equal, so that a collision costs a miss and never serves another's KV.

    root ── prefix 0 ── prefix 1 ── prefix 2          used by running sequences
                 └───── prefix 1' ── prefix 2'        unused: kept until its memory is needed

The last block of tokens of a prefix lies in one block of each KV group, or is gone there. In a
group without a window, a sequence that uses a block uses all blocks above it, and gives them back
from the deepest up. So among unused blocks, ordered by when they became unused, a child always
stands before its parent: the first one is the least recently used leaf, found without search. In
a group with a window the blocks above may go first. A prefix is known as long as it has a block
in any group, or a child.

Pinned blocks, those of prefixes shared by all scopes, stand apart while nobody uses them, and are
not given up. With a prefix all those above it are pinned.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from worker.engine.sequence import NOWHERE, Sequence
from worker.protocol.types import SharedPrefix

Namespace = tuple[str, str | None]
"""Adapter digest ("" for the base model) and cache scope (None: shared by all)."""


@dataclass(slots=True, eq=False)
class Prefix:
    """`tokens`, one block full, after those of `parent`. `blocks`: where they lie, by group.
    `pinned` is never true below a prefix that is not."""

    key: int
    parent: Prefix | None
    namespace: Namespace
    tokens: tuple[int, ...]
    blocks: list[int]
    children: int = 0
    pinned: bool = False

    def lineage(self) -> Iterator[Prefix]:
        """Itself and every prefix above."""
        prefix: Prefix | None = self
        while prefix is not None:
            yield prefix
            prefix = prefix.parent


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
        groups: int = 1,
        enabled: bool = True,
        hash_block: Callable[[object], int] = hash,
    ) -> None:
        self.block_size = block_size
        self.enabled = enabled
        self._groups = groups
        self._hash = hash_block
        self._root = hash_block(model_revision)
        self._by_key: dict[int, Prefix] = {}
        self._by_block: dict[int, Prefix] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()
        self._pinned: frozenset[int] = frozenset()
        self._kept: set[int] = set()

    def __len__(self) -> int:
        return len(self._by_block)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    @property
    def num_unused(self) -> int:
        return len(self._unused)

    @property
    def num_kept(self) -> int:
        """Pinned blocks that nobody uses."""
        return len(self._kept)

    def is_unused(self, block: int) -> bool:
        """Whether it may be given up."""
        return block in self._unused

    def share(self, prefixes: Iterable[SharedPrefix], most: int) -> int:
        """Full blocks of these prefixes in the scope that all share, cached now or later, are
        pinned, at most so many, the first first; others are not any more. Returns how many."""
        keys: dict[int, None] = {}
        for prefix in prefixes:
            for key in self._shared_keys(prefix):
                if key not in keys and len(keys) == most:
                    break
                keys[key] = None
        self._pin(frozenset(keys))
        return len(keys)

    def _shared_keys(self, prefix: SharedPrefix) -> Iterator[int]:
        key, tokens = self._root, prefix.token_ids
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            block = tokens[start : start + self.block_size]
            key = self._hash((key, (prefix.digest, None), block))
            yield key

    def _pin(self, keys: frozenset[int]) -> None:
        self._pinned = keys
        for prefix in self._by_key.values():  # those above come first
            prefix.pinned = self._pins(prefix)
        for block in [b for b in self._unused if self._by_block[b].pinned]:
            del self._unused[block]
            self._kept.add(block)
        released = [block for block in self._kept if not self._by_block[block].pinned]
        for block in sorted(released, key=self._depth, reverse=True):
            self._kept.remove(block)
            self._unused[block] = None

    def _pins(self, prefix: Prefix) -> bool:
        """A key that is pinned may, by a collision, stand under one that is not."""
        return prefix.key in self._pinned and (prefix.parent is None or prefix.parent.pinned)

    def _depth(self, block: int) -> int:
        return sum(1 for _ in self._by_block[block].lineage())

    def keys(self, sequence: Sequence, count: int) -> list[int]:
        """Chained keys of (at least) the first `count` full blocks, remembered on the sequence."""
        keys = sequence.block_keys
        while len(keys) < count:
            index = len(keys)
            parent = keys[-1] if keys else self._root
            content = (parent, self._namespace(sequence, index), self._tokens(sequence, index))
            keys.append(self._hash(content))
        return keys

    def match(self, sequence: Sequence, most: int) -> list[Prefix]:
        """The longest run of leading blocks, at most `most`, that are known (but perhaps not in
        every group)."""
        found: list[Prefix] = []
        parent: Prefix | None = None
        for index in range(most if self.enabled else 0):
            prefix = self._by_key.get(self.keys(sequence, index + 1)[index])
            if prefix is None or not self._verify(prefix, parent, sequence, index):
                break
            found.append(prefix)
            parent = prefix
        return found

    def publish(self, sequence: Sequence, index: int) -> Prefix | None:
        """Make the sequence's computed blocks `index` findable.

        Returns the prefix that now stands for this content; in groups where it was there before,
        its blocks are not the sequence's. None when it cannot be cached (a collision, its parent
        is not cached, or its blocks are given up already).
        """
        own = [table[index] for table in sequence.tables]
        parent = self._published(sequence, index - 1) if index else None
        if not self.enabled or (index and parent is None) or max(own) == NOWHERE:
            return None
        key = self.keys(sequence, index + 1)[index]
        prefix = self._by_key.get(key)
        if prefix is None:
            content = self._namespace(sequence, index), self._tokens(sequence, index)
            prefix = Prefix(key, parent, *content, [NOWHERE] * self._groups)
            prefix.pinned = self._pins(prefix)
            self._by_key[key] = prefix
            if parent is not None:
                parent.children += 1
        elif not self._verify(prefix, parent, sequence, index):
            return None
        for group, block in enumerate(own):
            if prefix.blocks[group] == NOWHERE != block:
                prefix.blocks[group] = block
                self._by_block[block] = prefix
        return prefix

    def use(self, block: int) -> None:
        """A sequence holds it: it is not given up."""
        self._unused.pop(block, None)
        self._kept.discard(block)

    def unuse(self, block: int) -> None:
        """No sequence holds it any more. Call for deeper blocks first."""
        if self._by_block[block].pinned:
            self._kept.add(block)
        else:
            self._unused[block] = None

    def evict(self) -> int:
        """Give up the least recently used leaf. Raises KeyError when every block is used."""
        block, _ = self._unused.popitem(last=False)
        self._drop(block)
        return block

    def purge(self, blocks: Iterable[int]) -> list[int]:
        """Forget these blocks, what they build on and what builds on them (their content cannot
        be trusted).

        Returns those that were unused. Takes a look at every cached block: for errors only.
        """
        found = [self._by_block[block] for block in blocks if block in self._by_block]
        doomed = {id(above) for prefix in found for above in prefix.lineage()}
        known = list(self._by_key.values())
        while extra := {id(p) for p in known if p.parent and id(p.parent) in doomed} - doomed:
            doomed |= extra
        gone = [block for block, prefix in self._by_block.items() if id(prefix) in doomed]
        for block in gone:
            self._drop(block)
        idle = [block for block in gone if block in self._unused or block in self._kept]
        for block in idle:
            self.use(block)
        return idle

    def check_integrity(self, is_used: Callable[[int], bool], full_groups: Iterable[int]) -> None:
        """Raises AssertionError when the index contradicts itself or the users of its blocks."""
        full = tuple(full_groups)
        position = {block: place for place, block in enumerate(self._unused)}
        for block, prefix in self._by_block.items():
            assert prefix.blocks.count(block) == 1, f"block {block} is filed under another"
            assert self._by_key[prefix.key] is prefix, f"block {block} has lost its key"
            idle = (block in self._unused) + (block in self._kept)
            assert is_used(block) + idle == 1, f"block {block}: used and unused"
            assert block not in self._kept or prefix.pinned, f"block {block} is kept"
            parent, group = prefix.parent, prefix.blocks.index(block)
            if parent is None or group not in full:
                continue
            above = parent.blocks[group]
            assert self._by_block.get(above) is parent, f"parent of block {block} is gone"
            if above in position:
                assert block in position, "a parent would go before a child that is kept"
                assert position[block] < position[above], "a parent would go first"
        children = Counter(id(prefix.parent) for prefix in self._by_key.values())
        for prefix in self._by_key.values():
            blocks = [block for block in prefix.blocks if block != NOWHERE]
            assert all(self._by_block[block] is prefix for block in blocks), "a block is lost"
            assert prefix.children == children[id(prefix)], "children are miscounted"
            assert blocks or prefix.children, "a prefix leads nowhere"

    def _published(self, sequence: Sequence, index: int) -> Prefix | None:
        """What the sequence's blocks `index` are filed under."""
        blocks = (table[index] for table in sequence.tables)
        return next((self._by_block.get(block) for block in blocks if block != NOWHERE), None)

    def _drop(self, block: int) -> None:
        prefix = self._by_block.pop(block)
        prefix.blocks[prefix.blocks.index(block)] = NOWHERE
        for each in prefix.lineage():
            if each.children or any(place != NOWHERE for place in each.blocks):
                return
            del self._by_key[each.key]
            if each.parent is not None:
                each.parent.children -= 1

    def _verify(
        self, prefix: Prefix, parent: Prefix | None, sequence: Sequence, index: int
    ) -> bool:
        return (
            prefix.parent is parent
            and prefix.namespace == self._namespace(sequence, index)
            and prefix.tokens == self._tokens(sequence, index)
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
