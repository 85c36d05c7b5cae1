"""uvicorn, ended by a signal with status 0 once what runs has been answered."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn


class GracefulServer(uvicorn.Server):
    """uvicorn's own server raises a signal again after it has stopped, which ends the process
    as if it had been killed. A second SIGINT still stops it at once."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield
