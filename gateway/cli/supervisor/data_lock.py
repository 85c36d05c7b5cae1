"""One supervisor per data directory."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gateway.cli.errors import CommandError, DataLocked


@contextmanager
def locked(data: Path) -> Iterator[None]:
    """Hold DATA/supervisor.lock; the kernel drops it with this process, however that ends.

    Raises DataLocked naming the holder's pid, or CommandError when the folder cannot be written.
    """
    try:
        data.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(data / "supervisor.lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise CommandError(f"the data directory {data} cannot be used: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 32, 0).decode().strip()
            raise DataLocked(
                f"another `batten up` (pid {holder or 'unknown'}) runs on {data}; "
                "stop it, or choose another directory with --data"
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
