"""One byte range of a blob (RFC 9110 §14): what `Range: bytes=…` asks for."""

from __future__ import annotations

import re
from dataclasses import dataclass

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes [start, end) of a blob of `size` bytes."""

    start: int
    end: int
    size: int

    @property
    def content_range(self) -> str:
        return f"bytes {self.start}-{self.end - 1}/{self.size}"


class Unsatisfiable(Exception):
    """The range lies outside the blob (416)."""


def parse_range(header: str | None, size: int) -> ByteRange | None:
    """None when the whole blob is to be sent: no header, or one that we may ignore (several
    ranges, another unit, nonsense). Raises Unsatisfiable."""
    match = _RANGE.fullmatch((header or "").strip())
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if first == "":
        start, end = max(0, size - int(last)), size
    else:
        start, end = int(first), min(size, int(last) + 1 if last else size)
        if last and int(last) < start:
            return None
    if start >= size or start >= end:
        raise Unsatisfiable
    return ByteRange(start, end, size)
