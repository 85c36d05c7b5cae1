"""Who holds which KV block. Bookkeeping only: no tensor is touched here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from worker.engine.prefix_cache import PrefixCache
from worker.engine.sequence import Sequence


class BlockManager:
    """Fixed-size blocks, counted by the sequences whose table names them.

    free ──grow──> held (count ≥ 1) ──release──> free
                     ^                 └──────> cached, unused ──evicted by grow──> held
                     └──attach (a prefix hit)──────┘
    """

    def __init__(self, num_blocks: int, block_size: int, cache: PrefixCache) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.cache = cache
        self.evictions = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._count = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be had now: empty ones and cached ones nobody uses."""
        return len(self._free) + self.cache.num_unused

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def is_used(self, block: int) -> bool:
        return self._count[block] > 0

    def match(self, sequence: Sequence) -> list[int]:
        """Cached blocks that `sequence` can start from; its last token is always left to compute
        (a next token needs its logits)."""
        return self.cache.match(sequence, (sequence.num_tokens - 1) // self.block_size)

    def attach(self, sequence: Sequence, blocks: Iterable[int]) -> None:
        """Begin an empty table with blocks that `match` found."""
        for block in blocks:
            self._hold(block)
            sequence.block_table.append(block)
        sequence.num_published = len(sequence.block_table)
        sequence.num_computed = sequence.num_published * self.block_size

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make the table hold `num_tokens` tokens. False, and nothing changes, if it cannot."""
        table = sequence.block_table
        missing = -(-num_tokens // self.block_size) - len(table)
        if missing > self.num_free:
            return False
        for _ in range(missing):
            block = self._take()
            self._count[block] = 1
            table.append(block)
        return True

    def publish(self, sequence: Sequence) -> None:
        """Let others find the full blocks computed so far.

        A block whose content was cached meanwhile is exchanged for the cached one, so that the
        published part of every table is a chain of cached blocks.
        """
        for index in range(sequence.num_published, sequence.num_computed // self.block_size):
            own = sequence.block_table[index]
            block = self.cache.publish(sequence, index)
            if block is None:
                return
            if block != own:
                self._hold(block)
                sequence.block_table[index] = block
                self._drop(own)
            sequence.num_published = index + 1

    def release(self, sequence: Sequence, *, trusted: bool = True) -> None:
        """Give back all blocks; published ones stay findable unless they are not `trusted`."""
        if not trusted:
            self._free.extend(self.cache.purge(sequence.block_table))
        for block in reversed(sequence.block_table):
            self._drop(block)
        sequence.block_table.clear()
        sequence.num_computed = sequence.num_published = 0

    def check_integrity(self, holders: Iterable[Sequence]) -> None:
        """Raises AssertionError unless the counts are exactly those of `holders`' tables and
        every block is in one place."""
        counts = Counter(block for sequence in holders for block in sequence.block_table)
        for block in range(self.num_blocks):
            assert self._count[block] == counts[block], (
                f"block {block} is counted {self._count[block]} times, held {counts[block]} times"
            )
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        for block in range(self.num_blocks):
            places = (block in free) + (counts[block] > 0)
            places += block in self.cache and not counts[block]
            assert places == 1, f"block {block} is in {places} places"
        self.cache.check_integrity(self.is_used)

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        self.evictions += 1
        return self.cache.evict()

    def _hold(self, block: int) -> None:
        self._count[block] += 1
        self.cache.use(block)

    def _drop(self, block: int) -> None:
        self._count[block] -= 1
        if self._count[block]:
            return
        if block in self.cache:
            self.cache.unuse(block)
        else:
            self._free.append(block)
