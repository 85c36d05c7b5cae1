"""What an event does to a request: a pure function of the row and the event.

An event of another attempt, or about a request that is not out, changes nothing. A lost lease
sends the request back to the queue, until it has crashed often enough while it ran alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.jobs.dispatch import CANCELLED
from gateway.jobs.locking import Standing
from gateway.jobs.responses import attempts_exhausted, failure
from gateway.jobs.settlement import Settlement
from gateway.jobs.states import OUT
from worker.protocol.messages import (
    Cancelled,
    Failed,
    Finished,
    GenerationEvent,
    LeaseLost,
    Started,
)


@dataclass(frozen=True, slots=True)
class Ignore:
    pass


@dataclass(frozen=True, slots=True)
class Begin:
    pass


@dataclass(frozen=True, slots=True)
class Answer:
    finished: Finished


@dataclass(frozen=True, slots=True)
class Requeue:
    failed: bool = False
    crashed: bool = False
    alone: bool = False


@dataclass(frozen=True, slots=True)
class End:
    settlement: Settlement


Decision = Ignore | Begin | Answer | Requeue | End


def decide(row: Standing, event: GenerationEvent, max_attempts: int) -> Decision:
    if event.attempt != row.attempt or row.state not in OUT:
        return Ignore()
    match event:
        case Started():
            return Begin() if row.state == "dispatched" else Ignore()
        case Finished():
            return Answer(event)
        case Cancelled():
            return End(CANCELLED)
        case Failed():
            return _after_failure(row, event, max_attempts)
        case LeaseLost():
            return _after_crash(row, event, max_attempts)
        case _:
            return Ignore()


def _after_failure(row: Standing, event: Failed, max_attempts: int) -> Decision:
    if row.cancel_requested_at is not None:
        return End(CANCELLED)
    if event.retryable and row.failures + 1 < max_attempts:
        return Requeue(failed=True)
    return _failed(*failure(event.code, event.message))


def _after_crash(row: Standing, event: LeaseLost, max_attempts: int) -> Decision:
    if row.cancel_requested_at is not None:
        return End(CANCELLED)
    alone = row.crashes_alone + int(event.alone)
    if alone >= max_attempts:
        return _failed(*attempts_exhausted(alone))
    return Requeue(crashed=True, alone=event.alone)


def _failed(status: int, body: dict[str, object]) -> End:
    return End(Settlement("failed", status_code=status, body=body))
