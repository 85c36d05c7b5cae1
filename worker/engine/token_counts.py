"""The tokens that a sequence has seen, kept from step to step."""

from __future__ import annotations

from array import array
from collections.abc import Iterable


class TokenCounts:
    """Distinct `tokens` in the order they were first seen, and the `times` each was chosen."""

    __slots__ = ("_places", "_read", "times", "tokens")

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        self.tokens = array("q", dict.fromkeys(prompt_ids))
        self.times = array("f", bytes(4 * len(self.tokens)))
        self._places = {token: place for place, token in enumerate(self.tokens)}
        self._read = 0

    def update(self, output_ids: list[int]) -> None:
        """Count what `output_ids` has more than at the last call."""
        for token in output_ids[self._read :]:
            place = self._places.get(token)
            if place is None:
                self._places[token] = len(self.tokens)
                self.tokens.append(token)
                self.times.append(1)
            else:
                self.times[place] += 1
        self._read = len(output_ids)
