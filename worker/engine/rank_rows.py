"""Which rows of the rank pool are free."""

from __future__ import annotations


class RankRows:
    """Rows 0 to `total` - 1. Neighbouring rows are preferred, since a slice of the pool needs
    no gathering, but scattered ones serve as well: nothing is lost to fragmentation."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = set(range(total))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...]:
        """`count` free rows, from the smallest gap that holds them all if there is one."""
        if count > len(self._free):
            raise ValueError(f"{count} rows of {len(self._free)} free")
        gaps = [gap for gap in self._gaps() if len(gap) >= count]
        source = min(gaps, key=len) if gaps else sorted(self._free)
        rows = tuple(source[:count])
        self._free.difference_update(rows)
        return rows

    def give_back(self, rows: tuple[int, ...]) -> None:
        if not self._free.isdisjoint(rows):
            raise ValueError(f"rows {rows} are free already")
        self._free.update(rows)

    def _gaps(self) -> list[list[int]]:
        gaps: list[list[int]] = []
        for row in sorted(self._free):
            if gaps and gaps[-1][-1] == row - 1:
                gaps[-1].append(row)
            else:
                gaps.append([row])
        return gaps
