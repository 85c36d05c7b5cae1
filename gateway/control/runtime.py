"""A pool process's own event loop and connections, made at its first task.

Engines and sockets do not survive a fork, so nothing is opened in the parent.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import structlog

from gateway.kit.context import Context, open_context
from gateway.kit.endurance import OUTAGES
from gateway.settings import Settings

Work = Callable[[Context], Awaitable[object]]

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Opened:
    pid: int
    runner: asyncio.Runner
    stack: AsyncExitStack
    context: Context


class Runtime:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._opened: _Opened | None = None
        self._stopping = mmap.mmap(-1, 1)  # shared with the pool; a lock could die with a child

    def stop(self, **_: Any) -> None:
        """In the parent: the pool's processes are to come to an end."""
        self._stopping[0] = 1

    def is_stopping(self) -> bool:
        return self._stopping[0] == 1

    def run(self, name: str, work: Work) -> None:
        """An outage ends the task quietly: a sweep will send it again."""
        opened = self._open()

        async def bound() -> None:
            try:
                await work(opened.context)
            except OUTAGES as error:
                _log.warning("task_postponed", task=name, error=f"{type(error).__name__}: {error}")

        opened.runner.run(bound())

    def close(self, **_: Any) -> None:
        if self._opened is not None and self._opened.pid == os.getpid():
            opened, self._opened = self._opened, None
            opened.runner.run(opened.stack.aclose())
            opened.runner.close()

    def _open(self) -> _Opened:
        if self._opened is None or self._opened.pid != os.getpid():
            runner, stack = asyncio.Runner(), AsyncExitStack()
            context = runner.run(stack.enter_async_context(open_context(self._settings)))
            self._opened = _Opened(os.getpid(), runner, stack, context)
        return self._opened
