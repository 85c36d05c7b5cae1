r"""Lines of an input file as they stream from the store, in chunks.

Only `\n` ends a line: U+2028 and its kind are text. A byte order mark at the file's start, `\r`
before `\n` and blank lines are accepted; numbers stay physical. Memory is bounded by the longest
line allowed, whatever the file holds.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from gateway.batches.lines import RawLine

BOM = b"\xef\xbb\xbf"
_BLANK = b" \t\r\n\x0b\x0c"

CHUNK_LINES = 500
CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Chunk:
    """`end` and `number` are where the next chunk begins: offset and last physical line."""

    lines: list[RawLine]
    end: int
    number: int


async def read_chunks(
    pieces: AsyncIterator[bytes], offset: int, number: int, longest: int
) -> AsyncIterator[Chunk]:
    """`pieces` are the file from `offset` on, which follows physical line `number`."""
    lines: list[RawLine] = []
    size = 0
    async for line in _lines(pieces, offset, number, longest):
        end = line.offset + line.length
        number, offset = line.number, end
        trimmed = _trimmed(line)
        if trimmed.data is not None and not trimmed.data.strip(_BLANK):
            continue
        lines.append(trimmed)
        size += line.length
        if len(lines) >= CHUNK_LINES or size >= CHUNK_BYTES:
            yield Chunk(lines, offset, number)
            lines, size = [], 0
    if lines:
        yield Chunk(lines, offset, number)


def _trimmed(line: RawLine) -> RawLine:
    """Without the line's end and the file's byte order mark."""
    if line.data is None:
        return line
    start = len(BOM) if line.offset == 0 and line.data.startswith(BOM) else 0
    data = line.data[start:].rstrip(b"\r\n")
    return RawLine(line.number, line.offset + start, len(data), data)


async def _lines(
    pieces: AsyncIterator[bytes], offset: int, number: int, longest: int
) -> AsyncIterator[RawLine]:
    """Each with its line end, so that offsets add up."""
    held, length = bytearray(), 0
    async for piece in pieces:
        for part in _split(bytes(piece)):
            length += len(part)
            if length <= longest + 2:
                held += part
            if part.endswith(b"\n"):
                number += 1
                yield _line(number, offset, length, held, longest)
                offset += length
                held, length = bytearray(), 0
    if length:
        yield _line(number + 1, offset, length, held, longest)


def _split(piece: bytes) -> list[bytes]:
    parts = [part + b"\n" for part in piece.split(b"\n")]
    last = parts.pop()[:-1]
    return [*parts, last] if last else parts


def _line(number: int, offset: int, length: int, held: bytearray, longest: int) -> RawLine:
    data = bytes(held) if length == len(held) else None
    if data is not None and len(data.rstrip(b"\r\n")) > longest:
        data = None
    return RawLine(number, offset, length, data)
