"""The header of a safetensors file, read and checked with the standard library alone.

8 bytes: header length, little endian | JSON header | tensor bytes
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_HEADER = 100_000_000
DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}


class SafetensorsError(ValueError):
    """Bytes that are not a complete safetensors file; the message says why."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: bytes [start, stop) of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """All tensors by name."""

    tensors: Mapping[str, TensorInfo]
    size: int  # of the file, in bytes


def parse_header(data: bytes | bytearray | memoryview) -> SafetensorsHeader:
    """The header of a whole file in memory (or mapped). Raises SafetensorsError."""
    return _parse(bytes(data[:8]), lambda start, stop: bytes(data[start:stop]), len(data))


def read_header(path: Path) -> SafetensorsHeader:
    """The header of a file, without reading its tensors. Raises SafetensorsError or OSError."""
    with path.open("rb") as file:
        size = path.stat().st_size
        return _parse(file.read(8), lambda start, stop: file.read(stop - start), size)


def _parse(prefix: bytes, read: Any, size: int) -> SafetensorsHeader:
    if len(prefix) < 8:
        raise SafetensorsError("truncated: no header")
    (length,) = struct.unpack("<Q", prefix)
    if length > min(MAX_HEADER, size - 8):
        if prefix.startswith((b"\x80", b"PK\x03\x04")):
            raise SafetensorsError("a pickle, not a safetensors file")
        raise SafetensorsError(f"truncated or no safetensors file: a header of {length} bytes")
    entries = _entries(read(8, 8 + length))
    tensors = {name: _tensor(name, entry, 8 + length) for name, entry in entries.items()}
    _check_cover(tensors, 8 + length, size)
    return SafetensorsHeader(tensors, size)


def _entries(header: bytes) -> dict[str, Any]:
    try:
        entries = json.loads(header, object_pairs_hook=_unique)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise SafetensorsError(f"the header is not JSON: {error}") from error
    if not isinstance(entries, dict):
        raise SafetensorsError("the header is not a JSON object")
    entries.pop("__metadata__", None)
    return entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise SafetensorsError("the header names a tensor twice")
    return result


def _tensor(name: str, entry: Any, data_start: int) -> TensorInfo:
    if not isinstance(entry, dict):
        raise SafetensorsError(f"{name}: not an object")
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise SafetensorsError(f"{name}: unknown dtype {dtype!r}")
    shape, offsets = _sizes(name, entry, "shape"), _sizes(name, entry, "data_offsets")
    if len(offsets) != 2:
        raise SafetensorsError(f"{name}: data_offsets are not two")
    start, stop = offsets
    if stop - start != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise SafetensorsError(f"{name}: {stop - start} bytes for {dtype} {shape}")
    return TensorInfo(dtype, tuple(shape), data_start + start, data_start + stop)


def _sizes(name: str, entry: dict[str, Any], field: str) -> list[int]:
    values = entry.get(field)
    if not isinstance(values, list) or not all(type(v) is int and v >= 0 for v in values):
        raise SafetensorsError(f"{name}: malformed {field}")
    return values


def _check_cover(tensors: Mapping[str, TensorInfo], start: int, size: int) -> None:
    """Tensors fill the data without gaps or overlaps, as the format demands."""
    position = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if tensor.start != position:
            raise SafetensorsError(f"{name}: a gap or overlap before its bytes")
        position = tensor.stop
    if position != size:
        kind = "truncated" if position > size else "trailing bytes"
        raise SafetensorsError(f"{kind}: tensors end at byte {position} of {size}")
