"""Adapters straight from the folders that PEFT wrote, without a store."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

from worker.adapters.loader import LoadedAdapter, load_adapter
from worker.adapters.stamp import Stamp, stamp
from worker.protocol import peft
from worker.protocol.errors import AdapterLoadError
from worker.protocol.types import AdapterRef


class FolderSource:
    """Folders by the digest of what they hold. One whose files change afterwards is refused."""

    def __init__(self) -> None:
        self._refs: dict[Path, AdapterRef] = {}
        self._folders: dict[str, tuple[Path, Stamp]] = {}

    def add(self, folder: Path) -> AdapterRef:
        """The folder's adapter, read and checked at its first use. Raises AdapterLoadError."""
        path = folder.expanduser().resolve()
        if path not in self._refs:
            ref, read = _reference(path)
            self._refs[path] = ref
            self._folders[ref.digest] = path, read
        return self._refs[path]

    def for_model(self, shapes: peft.Shapes) -> Callable[[AdapterRef], LoadedAdapter]:
        """What an adapter cache calls; `shapes` (out, in) are the model's modules."""
        return lambda adapter: load_adapter(self._unchanged(adapter.digest), shapes)

    def _unchanged(self, digest: str) -> Path:
        folder, read = self._folders[digest]
        if _stamp(folder) != read:
            raise AdapterLoadError("adapter_invalid", f"{folder}: changed since it was first used")
        return folder


def _stamp(folder: Path) -> Stamp:
    try:
        return stamp(folder)
    except OSError as error:
        raise AdapterLoadError("adapter_unavailable", str(error)) from error


def _reference(folder: Path) -> tuple[AdapterRef, Stamp]:
    weights = folder / peft.WEIGHTS_FILE
    read = _stamp(folder)
    try:
        config = peft.parse_config((folder / peft.CONFIG_FILE).read_bytes())
        header = peft.read_header(weights)
        with weights.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
            content = memoryview(data)
            try:
                problems = peft.find_not_finite(header, content)
                digest = peft.digest(config, header, content)
            finally:
                content.release()
    except (peft.AdapterConfigError, peft.SafetensorsError) as error:
        raise AdapterLoadError("adapter_invalid", f"{folder}: {error}") from error
    except (OSError, ValueError) as error:
        raise AdapterLoadError("adapter_unavailable", f"{folder}: {error}") from error
    if problems:
        message = f"{folder}: {problems[0].name} {problems[0].message}"
        raise AdapterLoadError("adapter_invalid", message)
    return AdapterRef(digest, peft.adapter_rank(config, header)), read
