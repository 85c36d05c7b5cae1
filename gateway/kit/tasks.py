"""The port through which a request tells the control processes that work is waiting.

A message is a hint, sent after the commit and never required: what it would have started is
also found by a sweep over SQL.
"""

from __future__ import annotations

from typing import Protocol


class Tasks(Protocol):
    async def send(self, name: str, *args: str) -> None:
        """Never raises: a broker that cannot be reached is logged."""


class SweptTasks:
    """Sends nothing: the sweeps find everything, only later."""

    async def send(self, name: str, *args: str) -> None:
        return None


class RecordedTasks:
    """Keeps what was sent, in order."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, ...]] = []

    async def send(self, name: str, *args: str) -> None:
        self.sent.append((name, *args))
