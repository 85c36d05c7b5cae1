"""One supervised child: started, watched, started again, stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gateway.cli.supervisor.backoff import Backoff
from gateway.cli.supervisor.guard import Guard
from gateway.cli.supervisor.logs import LogSink

LAST_WORDS_SECONDS = 1.0

_EXEC_BOUND = str(Path(__file__).with_name("exec_bound.py"))


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """`stop_seconds` from SIGTERM to SIGKILL."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    stop_seconds: float


@dataclass(frozen=True, slots=True)
class ChildEnded:
    """A child ended by itself; it is started again after `delay` seconds."""

    name: str
    status: int
    failures: int
    delay: float
    tail: tuple[str, ...]

    @property
    def how(self) -> str:
        if self.status < 0:
            return f"was killed by {signal.Signals(-self.status).name}"
        return f"ended with status {self.status}"


class Child:
    """Keeps one process running from `start` to `stop`."""

    def __init__(
        self, spec: ChildSpec, guard: Guard, sink: LogSink, report: Callable[[ChildEnded], None]
    ) -> None:
        self.spec = spec
        self._guard = guard
        self._sink = sink
        self._report = report
        self._stopping = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._began = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def uptime(self) -> float:
        """Seconds since it was last started; 0 while it is not running."""
        running = self._process is not None and self._process.returncode is None
        return time.monotonic() - self._began if running else 0.0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def tail(self) -> list[str]:
        return self._sink.tail()

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_running(), name=self.spec.name)

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL once `stop_seconds` are over. Returns when it is gone."""
        self._stopping.set()
        if self._task is None:
            return
        self._signal(signal.SIGTERM)
        done, _ = await asyncio.wait({self._task}, timeout=self.spec.stop_seconds)
        if not done:
            self.kill()
        await self._task
        self._sink.close()

    def kill(self) -> None:
        """End the whole group at once; `stop` still has to be awaited."""
        self._stopping.set()
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _keep_running(self) -> None:
        backoff = Backoff()
        while not self._stopping.is_set():
            self._began = time.monotonic()
            status = await self._run()
            if self._stopping.is_set():
                return
            backoff = backoff.after(time.monotonic() - self._began)
            tail = tuple(self._sink.tail())
            self._report(ChildEnded(self.spec.name, status, backoff.failures, backoff.delay, tail))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), backoff.delay)

    async def _run(self) -> int:
        self._sink.begin()
        reading, writing = os.pipe()
        try:
            process = await self._spawn(writing)
        finally:
            os.close(writing)
        self._process = process
        self._guard.add(process.pid)
        if self._stopping.is_set():  # stopped while it was being started
            self._signal(signal.SIGTERM)
        pump = asyncio.create_task(self._pump(reading))
        status = await process.wait()
        self._guard.discard(process.pid)
        await asyncio.wait({pump}, timeout=LAST_WORDS_SECONDS)
        pump.cancel()
        return status

    async def _spawn(self, output: int) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *("-I", "-S", _EXEC_BOUND, str(os.getpid()), *self.spec.argv),
            env=dict(self.spec.env),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )

    async def _pump(self, reading: int) -> None:
        """Not asyncio's own pipe: with that, `wait` also waits for grandchildren to close it."""
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb", buffering=0)
        )
        try:
            while chunk := await reader.read(65_536):
                self._sink.write(chunk)
        finally:
            transport.close()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)
