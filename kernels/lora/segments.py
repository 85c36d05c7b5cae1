"""Which adapter each token of a step has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from kernels.errors import KernelArgumentError


@dataclass(frozen=True, slots=True, eq=False)
class LoraSegments:
    """Which pool rows each packed token uses: launch metadata of one step, for all modules.

    Example: 3 base tokens, then 2 of an adapter that owns rows 4 and 5, then 1 of a third with
    rows 0 to 3.

        spans  ((3, 5, (4, 5)), (5, 6, (0, 1, 2, 3)))      start, stop, rows

    Base tokens are in no span: nothing is launched for them. `derived` holds what a backend
    computes from the spans once per step.
    """

    num_tokens: int
    spans: tuple[tuple[int, int, tuple[int, ...]], ...]
    derived: dict[object, object] = field(default_factory=dict)

    @property
    def rows(self) -> frozenset[int]:
        """All pool rows that the step uses."""
        if "rows" not in self.derived:
            self.derived["rows"] = frozenset(row for span in self.spans for row in span[2])
        return cast(frozenset[int], self.derived["rows"])

    @property
    def last_row(self) -> int:
        """The largest of them; -1 if there is none."""
        if "last row" not in self.derived:
            self.derived["last row"] = max(self.rows, default=-1)
        return cast(int, self.derived["last row"])

    @classmethod
    def build(
        cls, runs: Sequence[tuple[int, int]], adapter_rows: Sequence[Sequence[int]]
    ) -> LoraSegments:
        """From `runs` (adapter, tokens) in packed order, where adapter -1 is the base model.

        Neighbouring runs of one adapter become one span. Raises KernelArgumentError for an
        adapter that `adapter_rows` does not list.
        """
        spans: list[tuple[int, int, tuple[int, ...]]] = []
        start, previous = 0, -1
        for adapter, tokens in runs:
            if not -1 <= adapter < len(adapter_rows):
                raise KernelArgumentError("runs", f"adapter {adapter} of {len(adapter_rows)}")
            if tokens < 0:
                raise KernelArgumentError("runs", f"{tokens} tokens")
            if adapter >= 0 and adapter == previous:
                first, _, rows = spans.pop()
                spans.append((first, start + tokens, rows))
            elif adapter >= 0:
                spans.append((start, start + tokens, tuple(adapter_rows[adapter])))
            start, previous = start + tokens, adapter
        return cls(num_tokens=start, spans=tuple(spans))
