"""Whether an adapter's files are still those that were read before."""

from __future__ import annotations

from pathlib import Path

from worker.protocol import peft

FILES = (peft.CONFIG_FILE, peft.WEIGHTS_FILE)

Stamp = tuple[tuple[int, int, int], ...]


def stamp(folder: Path) -> Stamp:
    """Another one once a file was changed or replaced. Raises OSError when one is missing."""
    found = [(folder / name).stat() for name in FILES]
    return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in found)
