"""Pump 1: events of one model into SQL, many per transaction.

    read → decide → one transaction (states, results, usage, counts) → forget → ack → ring

A crash after the commit makes the events come again; they then change nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from sqlalchemy import select

from gateway.collector.effects import Effects, effects_of
from gateway.collector.observations import counts_of
from gateway.jobs.locking import Locked, Standing, lock
from gateway.jobs.responses import answered, not_recorded, response_body
from gateway.jobs.settlement import Settlement, settle
from gateway.jobs.states import OUT, TERMINAL
from gateway.kit.clock import now_ms
from gateway.kit.context import Context
from gateway.kit.database import WriteSession
from gateway.kit.endurance import OUTAGES
from gateway.kit.prompts import Prompts
from gateway.kit.sql import update_rows
from gateway.kit.task_names import DELIVER, FINALIZE
from gateway.kit.tasks import Tasks
from gateway.models import Request
from gateway.webhooks.service import has_deliveries
from worker.protocol.messages import Finished, GenerationEvent
from worker.protocol.types import RequestId
from worker.queue.base import EventStream, RequestQueue, StreamEntry

EVENTS_PER_TRANSACTION = 500

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Folded:
    """What must happen after the commit."""

    ended: tuple[RequestId, ...] = ()
    ready_batches: tuple[str, ...] = ()
    freed: bool = False
    deliveries: bool = False
    answers: tuple[tuple[Standing, Finished], ...] = ()


class Fold:
    """Folds one model's events. `prompts` spells tokens in log-probabilities."""

    def __init__(self, context: Context, model: str, prompts: Prompts, tasks: Tasks) -> None:
        self._context = context
        self._prompts = prompts
        self._tasks = tasks
        self._queue: RequestQueue = context.queues.queue(model)
        self._stream: EventStream = context.queues.events(model)
        self._untaken: list[StreamEntry] = []
        self._one_at_a_time = asyncio.Lock()

    async def step(self, consumer: str, timeout: float) -> bool:
        """One read, or what an outage left unfinished. True when room came free in the queue."""
        async with self._one_at_a_time:
            if not self._untaken:
                self._untaken = await self._stream.read(consumer, EVENTS_PER_TRANSACTION, timeout)
            if not self._untaken:
                return False
            freed = await self.take(self._untaken)
            self._untaken = []
            return freed

    async def take(self, entries: Sequence[StreamEntry]) -> bool:
        events = [entry.event for entry in entries if entry.event is not None]
        folded = await self._commit_all(events) if events else Folded()
        if folded.ended:
            await self._queue.forget(folded.ended)
        await self._stream.ack([entry.entry_id for entry in entries])
        if folded.ended:
            await self._context.queues.bell.ring(folded.ended)
        for batch_id in folded.ready_batches:
            await self._tasks.send(FINALIZE, batch_id)
        if folded.deliveries:
            await self._tasks.send(DELIVER)
        await self._count(folded)
        return folded.freed

    async def _count(self, folded: Folded) -> None:
        counts = counts_of(folded.answers, now_ms())
        await self._context.queues.statistics.add_or_lose(counts)

    async def _commit_all(self, events: Sequence[GenerationEvent]) -> Folded:
        """An event that cannot be recorded must not hold up the others, nor come again for
        ever: it is tried alone, and then its request fails."""
        try:
            return await self.commit(events)
        except OUTAGES:
            raise
        except Exception as error:  # the edge of what workers send
            if len(events) == 1:
                _log.error("event_not_recorded", request_id=events[0].request_id, exc_info=error)
                return await self._fail(events[0])
        return _joined([await self._commit_all([event]) for event in events])

    async def _fail(self, event: GenerationEvent) -> Folded:
        status, body = not_recorded()
        async with self._context.database.write() as session:
            locked = await lock(session, [event.request_id])
            row = locked.requests.get(event.request_id)
            current = row is not None and row.attempt == event.attempt and row.state in OUT
            failed: dict[str, Settlement] = {}
            if current:
                failed[event.request_id] = Settlement("failed", status, body)
            ready = await settle(session, locked, failed)
        ended = (event.request_id,) if current else ()
        return Folded(ended, tuple(ready), bool(current), has_deliveries(session))

    async def commit(self, events: Sequence[GenerationEvent]) -> Folded:
        """The transaction."""
        async with self._context.database.write() as session:
            locked = await lock(session, [event.request_id for event in events])
            most = self._context.settings.max_attempts
            effects = effects_of(locked.requests, events, most, self._answer)
            ready = await settle(session, locked, effects.settlements)
            await _move(session, effects)
            cancelling = await _idle_cancelling(session, locked, effects)
        ended = {
            event.request_id
            for event in events
            if event.request_id not in locked.requests
            or locked.requests[event.request_id].state in TERMINAL
        }
        batches = dict.fromkeys([*ready, *cancelling])
        answers = tuple(
            (locked.requests[event.request_id], event)
            for event in events
            if isinstance(event, Finished)
            and (settled := effects.settlements.get(event.request_id)) is not None
            and settled.usage is event.usage
        )
        return Folded(
            tuple(sorted(ended)),
            tuple(batches),
            effects.freed,
            has_deliveries(session),
            answers,
        )

    def _answer(self, row: Standing, finished: Finished) -> Settlement:
        body = response_body(answered(row), finished, self._prompts)
        return Settlement("completed", 200, body, usage=finished.usage)


async def _move(session: WriteSession, effects: Effects) -> None:
    names = ("id", "state", "started_at", "failures", "crashes", "crashes_alone", "suspects")
    moved = [
        {name: getattr(row, name) for name in names}
        for row in effects.moved.values()
        if row.id not in effects.settlements
    ]
    await update_rows(session, Request, moved)


def _joined(parts: Sequence[Folded]) -> Folded:
    return Folded(
        tuple(request_id for part in parts for request_id in part.ended),
        tuple(dict.fromkeys(batch_id for part in parts for batch_id in part.ready_batches)),
        any(part.freed for part in parts),
        any(part.deliveries for part in parts),
        tuple(answer for part in parts for answer in part.answers),
    )


async def _idle_cancelling(session: WriteSession, locked: Locked, effects: Effects) -> list[str]:
    """Batches that are being cancelled and have just seen their last running line end."""
    touched = {locked.requests[request_id].batch_id for request_id in effects.settlements}
    cancelling = {
        batch.id
        for batch in locked.batches.values()
        if batch.id in touched and batch.status == "cancelling"
    }
    if not cancelling:
        return []
    await session.flush()
    busy = await session.scalars(
        select(Request.batch_id)
        .where(Request.batch_id.in_(cancelling), Request.state.in_(("dispatched", "running")))
        .distinct()
    )
    return sorted(cancelling.difference(busy))
