"""A child's output: into a file of bounded size, and its last lines kept for when it dies."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

ROTATE_BYTES = 16 * 2**20
KEPT_FILES = 3
TAIL_LINES = 12


class LogSink:
    """`name.log`, then `name.log.1` … as it grows. `echo` sees each complete line."""

    def __init__(
        self,
        path: Path,
        echo: Callable[[str], None] | None = None,
        rotate_bytes: int = ROTATE_BYTES,
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._echo = echo
        self._rotate_bytes = rotate_bytes
        self._file = path.open("ab")
        self._partial = b""
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    def write(self, chunk: bytes) -> None:
        if self._file.tell() + len(chunk) > self._rotate_bytes:
            self._rotate()
        self._file.write(chunk)
        self._file.flush()
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        for line in lines:
            self._keep(line)

    def begin(self) -> None:
        """A new process writes: its predecessor's lines are no reason for its end."""
        self._tail.clear()
        self._partial = b""

    def tail(self) -> list[str]:
        """The last lines, an unfinished one included."""
        rest = [self._partial.decode(errors="replace")] if self._partial else []
        return [*self._tail, *rest]

    def close(self) -> None:
        self._file.close()

    def _keep(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        if text.strip():
            self._tail.append(text)
        if self._echo is not None:
            self._echo(text)

    def _rotate(self) -> None:
        self._file.close()
        for number in range(KEPT_FILES - 1, 0, -1):
            older = self._numbered(number)
            if older.exists():
                older.replace(self._numbered(number + 1))
        self.path.replace(self._numbered(1))
        self._file = self.path.open("ab")

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")
