"""The engine, alone in its thread.

    event loop --commands--> inbox --> [ apply commands; step ]* --outputs--> event loop

Only this thread touches the engine. Commands are functions of it, outputs come back through
`call_soon_threadsafe`, and what the loop wants to know at any time is published as one immutable
value after each turn. Without work the thread sleeps on the inbox; with work that cannot go on yet
(an adapter is on its way) it looks again every few milliseconds.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from worker.engine.engine import Engine
from worker.engine.metrics import EngineStats
from worker.engine.outputs import EngineOutput
from worker.protocol.types import Capacity

T = TypeVar("T")

STALLED_SECONDS = 0.005

Outputs = Sequence[EngineOutput]
Told = Callable[[], None]
Command = Callable[[Engine], Told]


class EngineStopped(Exception):
    """The command came after the thread's end and was not applied."""


@dataclass(frozen=True, slots=True)
class Published:
    """`busy`: another step is due; `stalled`: but had better be a little later."""

    busy: bool
    stalled: bool
    capacity: Capacity
    stats: EngineStats


class EngineThread:
    """Runs `engine` from `start` to `stop`; `on_outputs` and `on_crash` run in the event loop."""

    def __init__(
        self,
        engine: Engine,
        on_outputs: Callable[[Outputs], None],
        on_crash: Callable[[Exception], None],
    ) -> None:
        self._engine = engine
        self._on_outputs = on_outputs
        self._on_crash = on_crash
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._step_began: float | None = None
        self.published = self._snapshot()

    def start(self) -> None:
        """Call in the event loop that takes the outputs."""
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    async def stop(self, timeout: float) -> bool:
        """End after the step in progress; False when that takes longer than `timeout`."""
        self._inbox.put(None)
        await asyncio.wait({self._ended}, timeout=timeout)
        return self._ended.done()

    @property
    def step_seconds(self) -> float:
        """How long the step in progress has taken; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    async def call(self, command: Callable[[Engine], T]) -> T:
        """Run `command` between two steps; returns what it returned or raises what it raised, once
        `published` shows its effect."""
        answer: asyncio.Future[T] = self._loop.create_future()

        def apply(engine: Engine) -> Told:
            try:
                result = command(engine)
            except Exception as error:  # handed to whoever awaits
                return partial(self._to_loop, _settle, answer, None, error)
            return partial(self._to_loop, _settle, answer, result, None)

        self._inbox.put(apply)
        waits: set[asyncio.Future[Any]] = {answer, self._ended}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise EngineStopped("the engine has ended")
        return answer.result()

    def tell(self, command: Callable[[Engine], None]) -> None:
        """Run `command` between two steps; nobody waits. What it raises is a crash."""

        def apply(engine: Engine) -> Told:
            command(engine)
            return lambda: None

        self._inbox.put(apply)

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:  # the thread's edge
            self._to_loop(self._on_crash, error)
        finally:
            self._step_began = None
            self._to_loop(_settle, self._ended, None, None)

    def _turn(self) -> bool:
        """Commands, then one step. False when told to stop."""
        commands = self._commands()
        if None in commands:
            return False
        if commands:
            told = [command(self._engine) for command in commands if command]
            self.published = self._snapshot()
            for tell in told:
                tell()
        if self._engine.has_work():
            self._step_began = time.monotonic()
            outputs = self._engine.step()
            self._step_began = None
            self._to_loop(self._on_outputs, outputs)
        self.published = self._snapshot()
        return True

    def _commands(self) -> list[Command | None]:
        """All that wait; sleeps for a first one while a step would compute nothing."""
        commands: list[Command | None] = []
        try:
            if not self.published.busy:
                commands.append(self._inbox.get())
            elif self.published.stalled:
                commands.append(self._inbox.get(timeout=STALLED_SECONDS))
            while True:
                commands.append(self._inbox.get_nowait())
        except queue.Empty:
            return commands

    def _snapshot(self) -> Published:
        engine = self._engine
        return Published(
            busy=engine.has_work(),
            stalled=engine.stalled,
            capacity=engine.capacity(),
            stats=engine.stats(),
        )

    def _to_loop(self, function: Callable[..., None], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)


def _settle(answer: asyncio.Future[T], result: T, error: Exception | None) -> None:
    if answer.done():  # its caller was cancelled
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)
