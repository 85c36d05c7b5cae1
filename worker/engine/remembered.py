from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")

MOST = 16_384


class Remembered(OrderedDict[str, T], Generic[T]):
    """What was learnt about adapters, by digest, of the last `MOST` alone: a worker may meet any
    number of them, and what it has forgotten it finds out again."""

    def __setitem__(self, digest: str, fact: T) -> None:
        super().__setitem__(digest, fact)
        self.move_to_end(digest)
        if len(self) > MOST:
            self.popitem(last=False)
