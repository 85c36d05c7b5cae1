"""Who holds which KV block. Bookkeeping only: no tensor is touched here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from worker.engine.config import reach
from worker.engine.prefix_cache import Prefix, PrefixCache
from worker.engine.sequence import NOWHERE, Sequence


class BlockManager:
    """Fixed-size blocks, counted by the sequences whose tables name them.

    free ──grow──> held (count ≥ 1) ──release, prune──> free
                     ^                 └──────> cached, unused ──evicted by grow──> held
                     └──attach (a prefix hit)──────┘

    `windows` are those of the KV groups (`SchedulerConfig`). Each group has a table of its own;
    all take their blocks from here. In a group with a window, blocks that no later token sees are
    given back (`prune`), and a prefix hit needs and holds only the window's last ones.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        cache: PrefixCache,
        windows: tuple[int | None, ...] = (None,),
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.cache = cache
        self.windowed = windows != (None,)
        self.evictions = 0
        self._groups = len(windows)
        self._reaches = [
            None if window is None else reach(window, block_size) for window in windows
        ]
        self._free = list(range(num_blocks - 1, -1, -1))
        self._count = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be had now: empty ones and cached ones nobody uses."""
        return len(self._free) + self.cache.num_unused

    @property
    def num_used(self) -> int:
        """Blocks that cannot be had now."""
        return self.num_blocks - self.num_free

    @property
    def num_held(self) -> int:
        """Of those, what sequences hold: the rest is kept for shared prefixes."""
        return self.num_used - self.cache.num_kept

    def is_used(self, block: int) -> bool:
        return self._count[block] > 0

    def match(self, sequence: Sequence) -> list[Prefix]:
        """Cached blocks that `sequence` can start after; its last token is always left to compute
        (a next token needs its logits)."""
        path = self.cache.match(sequence, (sequence.num_tokens - 1) // self.block_size)
        return path[: self._usable(path)] if self.windowed else path

    def in_use(self, prefixes: list[Prefix], expected_tokens: int) -> int:
        """Of the blocks of `prefixes` that a sequence keeps until it has `expected_tokens`, how
        many are held by others, or kept."""
        needed = self._blocks_needed(prefixes, expected_tokens)
        return sum(not self.cache.is_unused(block) for block in needed)

    def attach(self, sequence: Sequence, prefixes: list[Prefix]) -> None:
        """Begin empty tables with what `match` found."""
        for block in self._blocks_needed(prefixes, len(prefixes) * self.block_size):
            self._hold(block)
            sequence.held_blocks += 1
        for group, table in enumerate(self._tables(sequence)):
            first = self._first_needed(group, len(prefixes) * self.block_size)
            table += [NOWHERE] * first
            table += (prefix.blocks[group] for prefix in prefixes[first:])
        sequence.num_published = len(prefixes)
        sequence.num_computed = sequence.num_published * self.block_size

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make the tables hold `num_tokens` tokens. False, and nothing changes, if they cannot."""
        missing = -(-num_tokens // self.block_size) - len(sequence.block_table)
        if missing <= 0:
            return True
        if missing * self._groups > self.num_free:
            return False
        for table in self._tables(sequence):
            for _ in range(missing):
                block = self._take()
                self._count[block] = 1
                table.append(block)
        sequence.held_blocks += missing * self._groups
        return True

    def publish(self, sequence: Sequence) -> None:
        """Let others find the full blocks computed so far.

        A block whose content was cached meanwhile is exchanged for the cached one, so that the
        published part of every table is made of cached blocks.
        """
        tables = sequence.tables
        for index in range(sequence.num_published, sequence.num_computed // self.block_size):
            prefix = self.cache.publish(sequence, index)
            if prefix is None:
                return
            for table, block in zip(tables, prefix.blocks, strict=True):
                own = table[index]
                if own not in (block, NOWHERE):
                    self._hold(block)
                    table[index] = block
                    self._drop(own)
            sequence.num_published = index + 1

    def prune(self, sequence: Sequence) -> None:
        """Give back what no token after those computed sees; it stays findable."""
        for group, table in enumerate(sequence.tables):
            index = self._first_needed(group, sequence.num_computed) - 1
            while index >= 0 and (block := table[index]) != NOWHERE:
                table[index] = NOWHERE
                self._drop(block)
                sequence.held_blocks -= 1
                index -= 1

    def release(self, sequence: Sequence, *, trusted: bool = True) -> None:
        """Give back all blocks; published ones stay findable unless they are not `trusted`."""
        tables = sequence.tables
        if not trusted:
            held = [block for table in tables for block in table if block != NOWHERE]
            self._free.extend(self.cache.purge(held))
        for blocks in zip(*map(reversed, tables), strict=True):
            for block in blocks:
                if block != NOWHERE:
                    self._drop(block)
        for table in tables:
            table.clear()
        sequence.held_blocks = sequence.num_computed = sequence.num_published = 0

    def check_integrity(self, holders: Iterable[Sequence]) -> None:
        """Raises AssertionError unless the counts are exactly those of `holders`' tables and
        every block is in one place."""
        counts: Counter[int] = Counter()
        for sequence in holders:
            held = [block for table in sequence.tables for block in table if block != NOWHERE]
            assert len(held) == sequence.held_blocks, f"{len(held)} held, {sequence.held_blocks=}"
            counts.update(held)
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
        full = [group for group, reaches in enumerate(self._reaches) if reaches is None]
        self.cache.check_integrity(self.is_used, full)

    def _tables(self, sequence: Sequence) -> tuple[list[int], ...]:
        if len(sequence.more_tables) < self._groups - 1:
            sequence.more_tables = tuple([] for _ in range(self._groups - 1))
        return sequence.tables

    def _first_needed(self, group: int, computed: int) -> int:
        """The first block that tokens from `computed` on see."""
        reaches = self._reaches[group]
        return 0 if reaches is None else max(0, computed - reaches) // self.block_size

    def _blocks_needed(self, prefixes: list[Prefix], computed: int) -> Iterator[int]:
        """In every group, the blocks of `prefixes` that tokens from `computed` on see."""
        for group in range(self._groups):
            first = self._first_needed(group, computed)
            for prefix in prefixes[first:]:
                yield prefix.blocks[group]

    def _usable(self, path: list[Prefix]) -> int:
        """The longest part of `path` whose end has all the blocks that the next token sees."""
        usable, runs = 0, [0] * self._groups
        for count, prefix in enumerate(path, 1):
            complete = True
            for group, block in enumerate(prefix.blocks):
                runs[group] = 0 if block == NOWHERE else runs[group] + 1
                first = self._first_needed(group, count * self.block_size)
                complete = complete and runs[group] >= count - first
            if complete:
                usable = count
        return usable

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
