"""Adapters from the object store to a folder on disk, named and checked by their digest.

adapters/{digest}/adapter_config.json
adapters/{digest}/adapter_model.safetensors
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import shutil
import tempfile
import threading
import time
from pathlib import Path

import obstore
import structlog
from obstore.exceptions import BaseError
from obstore.store import ObjectStore

from worker.adapters.stamp import FILES, Stamp, stamp
from worker.protocol import peft
from worker.protocol.errors import AdapterLoadError
from worker.protocol.object_store import reason

CHUNK = 16 * 2**20
AWAY_SECONDS = 5.0
IN_USE_SECONDS = 60.0
"""A folder that was asked for so lately may still be being read, here or in another process."""

_log = structlog.get_logger(__name__)


class AdapterStore:
    """A disk cache in front of an object store. Several processes may share `cache_dir`.

    A folder appears there in one rename, after its content was found to have its digest. One that
    this process has not written, or that has changed since, is checked again: a disk may lose what
    was written before a power failure. At most `max_bytes` are kept: the longest unused folders go
    first. Thread-safe.
    """

    def __init__(self, store: ObjectStore, cache_dir: Path, max_bytes: int = 20 << 30) -> None:
        self._store = store
        self._cache_dir = cache_dir
        self._max_bytes = max_bytes
        self._away_until = 0.0
        self._checked: dict[str, Stamp] = {}
        self._trimming = threading.Lock()
        self._bytes: int | None = None  # at least what lies in cache_dir, as far as we know
        cache_dir.mkdir(parents=True, exist_ok=True)

    def fetch(self, digest: str) -> Path:
        """The adapter's folder on disk.

        Raises AdapterLoadError `store_unavailable` when the store doesn't answer,
        `adapter_unavailable` when it has no such adapter, `adapter_invalid` when what it has is
        not what the digest names.
        """
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise AdapterLoadError("adapter_invalid", f"{digest!r} is no sha256")
        folder = self._cache_dir / digest
        try:
            if folder.is_dir() and not self._is_whole(folder, digest):
                self._remove(folder)
            if not folder.is_dir():
                self._download(digest, folder)
                self._make_room(keep=folder)
            os.utime(folder)  # its age is the time since its last use
        except OSError as error:
            raise AdapterLoadError("adapter_unavailable", str(error)) from error
        return folder

    def _is_whole(self, folder: Path, digest: str) -> bool:
        try:
            found = stamp(folder)
            if self._checked.get(digest) != found:
                _check(folder, digest)
                self._checked[digest] = found
        except (AdapterLoadError, FileNotFoundError) as error:
            _log.warning("cached_adapter_damaged", folder=str(folder), error=str(error))
            return False
        return True

    def _remove(self, folder: Path) -> None:
        """Which another process may have done meanwhile."""
        with (
            tempfile.TemporaryDirectory(prefix=".damaged-", dir=self._cache_dir) as parent,
            contextlib.suppress(FileNotFoundError),
        ):
            folder.rename(Path(parent) / folder.name)

    def _download(self, digest: str, folder: Path) -> None:
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=self._cache_dir) as parent:
            work = Path(parent) / digest
            work.mkdir()
            for name in FILES:
                self._get(f"adapters/{digest}/{name}", work / name)
            _check(work, digest)
            self._checked[digest] = stamp(work)
            _publish(work, folder)

    def _get(self, path: str, target: Path) -> None:
        """In chunks, each a request with the store's time limit of its own. A store that did not
        answer is left alone for a while: who waits for its time limit holds up others' adapters."""
        if time.monotonic() < self._away_until:
            message = f"the object store did not answer, and was not asked again for {path}"
            raise AdapterLoadError("store_unavailable", message)
        try:
            size = obstore.head(self._store, path)["size"]
            with target.open("wb") as file:
                for start in range(0, size, CHUNK):
                    stop = min(start + CHUNK, size)
                    file.write(obstore.get_range(self._store, path, start=start, end=stop))
        except FileNotFoundError as error:
            message = f"{path} is not in the object store"
            raise AdapterLoadError("adapter_unavailable", message) from error
        except BaseError as error:
            self._away_until = time.monotonic() + AWAY_SECONDS
            _log.warning("store_unavailable", path=path, error=reason(error))
            message = f"the object store did not answer for {path}"
            raise AdapterLoadError("store_unavailable", message) from error

    def _make_room(self, keep: Path) -> None:
        """The folder is looked through only when it may hold too much."""
        with self._trimming:
            if self._bytes is not None:
                self._bytes += _size(keep)
            if self._bytes is None or self._bytes > self._max_bytes:
                self._bytes = self._trim(keep)

    def _trim(self, keep: Path) -> int:
        """Bytes that are left."""
        folders = [path for path in self._cache_dir.iterdir() if not path.name.startswith(".")]
        sizes = {path: _size(path) for path in folders}
        total = sum(sizes.values())
        for path in sorted(folders, key=_last_use):
            if total <= self._max_bytes or _last_use(path) > time.time() - IN_USE_SECONDS:
                break
            if path != keep:
                shutil.rmtree(path, ignore_errors=True)  # another process may be doing it too
                self._checked.pop(path.name, None)
                total -= sizes[path]
        return total


def _size(folder: Path) -> int:
    """0 when another process has just removed it."""
    try:
        return sum(file.stat().st_size for file in folder.iterdir())
    except FileNotFoundError:
        return 0


def _last_use(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _check(folder: Path, digest: str) -> None:
    """Raises AdapterLoadError unless the files are readable, finite and have `digest`."""
    try:
        config = peft.parse_config((folder / peft.CONFIG_FILE).read_bytes())
        header = peft.read_header(folder / peft.WEIGHTS_FILE)
    except (peft.AdapterConfigError, peft.SafetensorsError) as error:
        raise AdapterLoadError("adapter_invalid", str(error)) from error
    with (folder / peft.WEIGHTS_FILE).open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        found = peft.digest(config, header, memoryview(data))
        problems = peft.find_not_finite(header, memoryview(data))
    if found != digest:
        raise AdapterLoadError("adapter_invalid", f"content has digest {found}, not {digest}")
    if problems:
        message = f"{problems[0].name} {problems[0].message}"
        raise AdapterLoadError("adapter_invalid", message)


def _publish(work: Path, folder: Path) -> None:
    """Rename into place; another process may have been faster, with the same content."""
    try:
        work.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
