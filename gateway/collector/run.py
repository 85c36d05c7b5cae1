"""The collector process: per base model, events into SQL and queued rows into the queue."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
from dataclasses import dataclass, field
from typing import Self

import structlog
from sqlalchemy import select

from gateway.collector.dispatcher import Dispatcher
from gateway.collector.fold import Fold
from gateway.collector.upkeep import Epochs, record_announcements, requeue_unknown
from gateway.control.broker import celery_tasks
from gateway.kit.context import Context, open_context
from gateway.kit.endurance import endure, pause
from gateway.kit.prompts import PromptsUnavailable
from gateway.kit.tasks import Tasks
from gateway.models import BaseModel
from gateway.settings import Settings
from gateway.system_prompts.service import publish

# Far longer than a step takes; each may be broken off, and whatever hangs, another follows.
STEP_SECONDS = 120.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds between repetitions."""

    read: float = 1.0
    dispatch: float = 0.5
    epoch: float = 1.0
    reap: float = 5.0
    lost: float = 15.0
    announcements: float = 2.0
    models: float = 2.0

    @classmethod
    def with_lease(cls, seconds: float) -> Self:
        return cls(reap=min(5.0, seconds / 3), lost=seconds / 4)


async def run_collector(settings: Settings) -> None:
    """Until SIGTERM or SIGINT. Raises MissingSetting."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with open_context(settings) as context:
        pace = Pace.with_lease(settings.lease_seconds)
        await Collector(context, celery_tasks(settings), pace).run(stop)


@dataclass(slots=True)
class Collector:
    context: Context
    tasks: Tasks
    pace: Pace = field(default_factory=Pace)
    consumer: str = field(
        default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    )
    _served: set[str] = field(default_factory=set)

    async def run(self, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            announcements = endure(
                "announcements",
                stop,
                lambda: record_announcements(self.context),
                self.pace.announcements,
            )
            group.create_task(announcements)
            await endure("models", stop, lambda: self._serve_new(group, stop), self.pace.models)

    async def _serve_new(self, group: asyncio.TaskGroup, stop: asyncio.Event) -> None:
        async with self.context.database.read() as session:
            models = list(await session.execute(select(BaseModel.name, BaseModel.source)))
        for name, source in models:
            if name in self._served:
                continue
            try:
                prompts = await self.context.prompts.of(source)
            except PromptsUnavailable as error:
                _log.error("model_not_served", model=name, error=str(error))
                await pause(stop, 5.0)
                continue
            self._served.add(name)
            fold = Fold(self.context, name, prompts, self.tasks)
            self._serve(group, stop, name, fold, Dispatcher(self.context, name, prompts))
            _log.info("model_served", model=name)

    def _serve(
        self,
        group: asyncio.TaskGroup,
        stop: asyncio.Event,
        model: str,
        fold: Fold,
        dispatcher: Dispatcher,
    ) -> None:
        room = asyncio.Event()
        epochs = Epochs(self.context, model, fold)
        queue = self.context.queues.queue(model)
        grace_ms = round(self.context.settings.lease_seconds * 500)

        async def collect() -> None:
            if await fold.step(self.consumer, self.pace.read):
                room.set()

        async def fill() -> None:
            room.clear()
            await dispatcher.fill()
            await _first_of(room, stop, self.pace.dispatch)

        async def check_epoch() -> None:
            if await epochs.check(self.consumer):
                room.set()

        for loop in (
            endure(f"fold:{model}", stop, collect, longest=STEP_SECONDS),
            endure(f"dispatch:{model}", stop, fill, longest=STEP_SECONDS),
            endure(f"epoch:{model}", stop, check_epoch, self.pace.epoch, STEP_SECONDS),
            endure(
                f"prefixes:{model}",
                stop,
                lambda: publish(self.context, model),
                self.pace.announcements,
            ),
            endure(f"reap:{model}", stop, queue.reap, self.pace.reap),
            endure(
                f"lost:{model}",
                stop,
                lambda: requeue_unknown(self.context, model, grace_ms),
                self.pace.lost,
            ),
        ):
            group.create_task(loop)


async def _first_of(room: asyncio.Event, stop: asyncio.Event, seconds: float) -> None:
    waits = [asyncio.create_task(room.wait()), asyncio.create_task(stop.wait())]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waits:
            task.cancel()
