"""A PEFT folder out of a .zip or .tar.gz. Blocks: run it in a thread.

Nothing is written where an archive says: the files we need go to fixed names. Archives
that try anything else (links, absolute paths, `..`) are refused all the same.
"""

from __future__ import annotations

import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, TypeVar

from gateway.adapters.folder_files import is_kept, is_refused, refusal
from worker.protocol.peft import CONFIG_FILE

MOST_MEMBERS = 10_000
SUFFIXES = (".zip", ".tar.gz", ".tgz", ".tar")
_CHUNK = 2**20

T = TypeVar("T")


class ArchiveRefused(Exception):
    """Broken, unsafe, too large, or without one adapter in it."""


@dataclass(frozen=True, slots=True)
class _Member:
    path: PurePosixPath
    open: Callable[[], IO[bytes] | None]


def is_archive(filename: str) -> bool:
    return filename.lower().endswith(SUFFIXES)


def unpack(archive: Path, folder: Path, most_bytes: int) -> None:
    """The files of the one adapter in `archive`, into `folder`. Raises ArchiveRefused."""
    try:
        with _members(archive, most_bytes) as members:
            home = _home(members)
            budget = most_bytes
            for member in members:
                if member.path.parent != home:
                    continue
                if is_refused(member.path.name):
                    raise ArchiveRefused(refusal(member.path.name))
                if is_kept(member.path.name):
                    budget -= _copy(member, folder / member.path.name, budget)
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise ArchiveRefused(f"the archive cannot be read: {error}") from error
    except (RuntimeError, NotImplementedError) as error:  # an encrypted or exotic zip
        raise ArchiveRefused(f"the archive cannot be read: {error}") from error


def _home(members: list[_Member]) -> PurePosixPath:
    """The folder nearest to the root that holds an adapter's config."""
    homes = sorted(
        (member.path.parent for member in members if member.path.name == CONFIG_FILE),
        key=lambda path: len(path.parts),
    )
    if not homes:
        raise ArchiveRefused(f"the archive holds no {CONFIG_FILE}")
    if len(homes) > 1 and len(homes[0].parts) == len(homes[1].parts):
        raise ArchiveRefused(f"the archive holds more than one adapter: {homes[0]}, {homes[1]}")
    return homes[0]


def _copy(member: _Member, target: Path, budget: int) -> int:
    source = member.open()
    if source is None:
        raise ArchiveRefused(f"{member.path} is not a file")
    written = 0
    with source, target.open("wb") as output:
        while chunk := source.read(_CHUNK):
            written += len(chunk)
            if written > budget:
                raise ArchiveRefused("the archive's content is too large")
            output.write(chunk)
    return written


@contextmanager
def _members(archive: Path, most_bytes: int) -> Iterator[list[_Member]]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as pack:
            yield [_zip_member(pack, info) for info in _few(pack.infolist()) if not info.is_dir()]
    else:
        with tarfile.open(archive, "r:*") as tape:
            yield [
                _tar_member(tape, info)
                for info in _few(_tape(tape, most_bytes))
                if not info.isdir()
            ]


def _few(members: Iterable[T]) -> Iterator[T]:
    for index, member in enumerate(members):
        if index >= MOST_MEMBERS:
            raise ArchiveRefused(f"the archive holds more than {MOST_MEMBERS} files")
        yield member


def _zip_member(pack: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Member:
    if stat.S_ISLNK(info.external_attr >> 16):
        raise ArchiveRefused(f"{info.filename} is a link")
    return _Member(_safe(info.filename), lambda: pack.open(info))


def _tape(tape: tarfile.TarFile, most_bytes: int) -> Iterator[tarfile.TarInfo]:
    """Going on to the next member decompresses this one, so sizes are summed first."""
    total = 0
    for info in tape:
        total += info.size
        if total > most_bytes:
            raise ArchiveRefused("the archive's content is too large")
        yield info


def _tar_member(tape: tarfile.TarFile, info: tarfile.TarInfo) -> _Member:
    if not info.isfile():
        raise ArchiveRefused(f"{info.name} is a link or a device")
    return _Member(_safe(info.name), lambda: tape.extractfile(info))


def _safe(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise ArchiveRefused(f"{name!r} points out of the archive")
    return path
