"""Runs a plan: start in order, keep running, stop in order."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from gateway.cli.errors import StartFailed
from gateway.cli.supervisor import readiness
from gateway.cli.supervisor.console import Reporter
from gateway.cli.supervisor.guard import Guard
from gateway.cli.supervisor.logs import LogSink
from gateway.cli.supervisor.plan import UpPlan, redis_child, service_children, worker_labels
from gateway.cli.supervisor.process import Child, ChildEnded, ChildSpec

FAILURES_BEFORE_READY = 3
SETTLED_SECONDS = 2.0


class Supervisor:
    """Children of one plan. `run` returns once `stop` was asked for and nothing is left."""

    def __init__(self, plan: UpPlan, reporter: Reporter) -> None:
        self._plan = plan
        self._reporter = reporter
        self._guard = Guard()
        self._services: list[Child] = []
        self._redis: Child | None = None
        self._stop = asyncio.Event()
        self._ready = False
        self._failure: StartFailed | None = None

    def stop(self) -> None:
        """Once: an orderly end. Again: kill what is left."""
        if self._stop.is_set():
            self._kill_all()
        self._stop.set()

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Raises StartFailed when a child keeps ending before the system was ready."""
        await self._guard.start()
        try:
            if await self._until_stopped(self._start()):
                self._ready = True
                on_ready()
                await self._stop.wait()
        finally:
            await self._end()
        if self._failure is not None:
            raise self._failure

    async def _start(self) -> None:
        if spec := redis_child(self._plan, os.environ):
            self._redis = self._launch(spec)
        await readiness.redis_answers(self._plan.redis_url)
        for spec in service_children(self._plan, os.environ):
            self._services.append(self._launch(spec))
        await readiness.api_answers(f"http://{_reachable(self._plan.host)}:{self._plan.port}")
        self._reporter.api_ready(self._plan)
        await readiness.workers_announced(self._plan.redis_url, worker_labels(self._plan))
        await readiness.poll(self._settled)

    async def _settled(self) -> bool:
        """No child is between two tries to start."""
        return all(child.uptime >= SETTLED_SECONDS for child in self._services)

    async def _until_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """True when the work was done, False when a stop came first."""
        task = asyncio.create_task(work)
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            return False
        await task
        return not self._stop.is_set()

    def _launch(self, spec: ChildSpec) -> Child:
        path = self._plan.data / "logs" / f"{spec.name}.log"
        child = Child(spec, self._guard, LogSink(path, self._reporter.echo(spec.name)), self._ended)
        child.start()
        return child

    def _ended(self, ended: ChildEnded) -> None:
        self._reporter.child_ended(ended)
        if not self._ready and ended.failures >= FAILURES_BEFORE_READY and not self._failure:
            last = ended.tail[-1] if ended.tail else "it wrote nothing"
            log = self._plan.data / "logs" / f"{ended.name}.log"
            self._failure = StartFailed(f"{ended.name} does not start: {last} (log: {log})")
            self._stop.set()

    async def _end(self) -> None:
        """API first, so that nothing new comes in; Redis last, so that all can still report."""
        self._reporter.stopping()
        for group in self._stop_order():
            await asyncio.gather(*(child.stop() for child in group))
        await self._guard.close()

    def _stop_order(self) -> list[list[Child]]:
        workers = [c for c in self._services if c.spec.name.startswith("worker-")]
        others = {c.spec.name: c for c in self._services if c not in workers}
        named = [[others[name]] for name in ("api",) if name in others]
        rest = [child for name, child in others.items() if name != "api"]
        return [*named, workers, rest, [self._redis] if self._redis else []]

    def _kill_all(self) -> None:
        for child in [*self._services, *([self._redis] if self._redis else [])]:
            child.kill()


def _reachable(host: str) -> str:
    """The address on which a listener at `host` answers from this machine."""
    match host:
        case "0.0.0.0" | "":
            return "127.0.0.1"
        case "::":
            return "[::1]"
        case _:
            return f"[{host}]" if ":" in host else host
