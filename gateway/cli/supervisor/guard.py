"""The supervisor's side of `guard_main.py`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

_MAIN = str(Path(__file__).with_name("guard_main.py"))


class Guard:
    """Groups that must not outlive this process. Restarted should somebody kill it."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._process: asyncio.subprocess.Process | None = None
        self._closing = False
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._spawn()
        self._watcher = asyncio.create_task(self._respawn())

    def add(self, group: int) -> None:
        self._groups.add(group)
        self._send(f"+{group}\n")

    def discard(self, group: int) -> None:
        """The group's leader has ended: end what it left behind, and forget it."""
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        self._groups.discard(group)
        self._send(f"-{group}\n")

    async def close(self) -> None:
        """Kill what is left and wait for the guard to end."""
        self._closing = True
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        if self._watcher is not None:
            await self._watcher

    async def _spawn(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-I", "-S", _MAIN),
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        for group in self._groups:
            self._send(f"+{group}\n")

    async def _respawn(self) -> None:
        while True:
            assert self._process is not None
            await self._process.wait()
            if self._closing:
                return
            await self._spawn()

    def _send(self, line: str) -> None:
        process = self._process
        if process is not None and process.stdin is not None and not process.stdin.is_closing():
            process.stdin.write(line.encode())
