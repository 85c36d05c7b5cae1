"""Children of a running `batten up`."""

from __future__ import annotations

import psutil


def child_of(supervisor: int, words: str) -> psutil.Process | None:
    """The child with these words in its command line, once it has become the program."""
    for process in psutil.Process(supervisor).children():
        try:
            line = " ".join(process.cmdline())
        except psutil.NoSuchProcess:
            continue
        if words in line and "exec_bound.py" not in line:
            return process
    return None
