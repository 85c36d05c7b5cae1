"""Full blocks that running sequences are about to compute, so that others wait and share them."""

from __future__ import annotations

from collections.abc import Iterable

from worker.engine.sequence import Sequence


class PendingPrefixes:
    """Which running sequence computes which prompt block, by chained key.

    Only running sequences own keys and only waiting ones wait for them, so nobody waits in a
    circle. Owners come to an end (computed, finished or preempted) and then give keys back.
    """

    def __init__(self) -> None:
        self._owner: dict[int, Sequence] = {}
        self._owned: dict[Sequence, dict[int, int]] = {}

    def __len__(self) -> int:
        return len(self._owner)

    def claim(self, sequence: Sequence, first: int, stop: int) -> None:
        """`sequence` will compute its blocks [first, stop). What another owns stays its own."""
        owned: dict[int, int] = {}
        for index in range(first, stop):
            key = sequence.block_keys[index]
            if self._owner.setdefault(key, sequence) is sequence:
                owned[key] = index
        if owned:
            self._owned[sequence] = owned

    def last_pending(self, keys: Iterable[int]) -> int | None:
        """The last of the leading `keys` that are being computed now: what to wait for."""
        last = None
        for key in keys:
            if key not in self._owner:
                break
            last = key
        return last

    def settle(self, sequence: Sequence, computed: int) -> list[int]:
        """The first `computed` blocks are done. Returns the keys nobody waits for any longer."""
        owned = self._owned.get(sequence)
        if owned is None:
            return []
        done = [key for key, index in owned.items() if index < computed]
        for key in done:
            del self._owner[key], owned[key]
        if not owned:
            del self._owned[sequence]
        return done

    def abandon(self, sequence: Sequence) -> list[int]:
        """`sequence` computes no more. Returns the keys it still owned."""
        keys = list(self._owned.pop(sequence, ()))
        for key in keys:
            del self._owner[key]
        return keys
