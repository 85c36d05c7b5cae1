"""What this process does with a lease.

Everything in flight is a `Held` lease, and its way ends in exactly one of four places:

    answered    the queue took its Finished, Failed or Cancelled event
    lost        the queue says that the lease is another's: the engine drops it, nothing is sent
    released    given back by a drain: ready for another worker, same attempt
    abandoned   the engine crashed, so the process ends and says nothing about what ran. The leases
                expire, and the reaper's LeaseLost counts the crash and isolates the suspects: a
                release or a Failed event would hide a request that kills engines
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import msgspec
import structlog

from worker.engine.engine import Engine
from worker.engine.errors import RequestRefused
from worker.engine.outputs import EngineOutput, StartedOutput
from worker.protocol.messages import Cancelled, Failed, Finished
from worker.protocol.types import REQUEST_CLASSES, Capacity, RequestId
from worker.queue.base import Lease, QueueUnavailable, RequestQueue
from worker.runtime.backoff import Backoff
from worker.runtime.engine_thread import EngineThread
from worker.runtime.events import refusal, to_event
from worker.runtime.held import Held, HeldLeases, engine_key
from worker.runtime.outbox import Outbox

_log = structlog.get_logger(__name__)

RELEASE_SECONDS = 3.0


class Worker:
    """Leases in, events out. One event loop; the engine runs in its own thread."""

    def __init__(self, name: str, engine: Engine, queue: RequestQueue) -> None:
        self.name = name
        self.queue = queue
        self.held = HeldLeases()
        self.thread = EngineThread(engine, self._on_outputs, self._on_crash)
        self.limits = engine.limits()
        self.outbox = Outbox(queue, self._settled)
        self.crashed: asyncio.Event = asyncio.Event()
        self.room = asyncio.Event()

    def capacity(self) -> Capacity:
        """Free now; `running` counts every lease held, answers under way included."""
        return msgspec.structs.replace(self.thread.published.capacity, running=len(self.held))

    async def admit(self, leases: Sequence[Lease]) -> None:
        """Hand claimed requests to the engine; returns when `capacity` accounts for them."""
        taken = [self._take(lease) for lease in leases]
        refused = await self.thread.call(lambda engine: [_add(engine, held) for held in taken])
        for held, error in zip(taken, refused, strict=True):
            if error is not None and not held.answered:
                held.answered = True
                self.outbox.put(held, refusal(held.lease.request, error))

    def cancel(self, request_ids: Iterable[RequestId]) -> None:
        """A tombstone is set: stop computing and say so."""
        for held in self.held.of(request_ids):
            if not held.answered:
                held.answered = True
                self._forget_in_engine(held)
                request = held.lease.request
                self.outbox.put(held, Cancelled(request.request_id, request.attempt))

    def lose(self, held: Held) -> None:
        """The lease is no longer ours."""
        request = held.lease.request
        _log.warning("lease_lost", request_id=request.request_id, attempt=request.attempt)
        held.lost = True
        self._forget_in_engine(held)
        self._remove(held)

    async def give_back(self, leases: Iterable[Held]) -> None:
        """Release what is not answered yet; what the queue cannot be told of will expire."""
        unanswered = [held for held in leases if not held.answered]
        done = await asyncio.gather(*(self._give_back(held) for held in unanswered))
        if unanswered:
            _log.info("released", count=sum(done), left_to_expire=len(done) - sum(done))

    async def _give_back(self, held: Held) -> bool:
        held.answered = True
        self._forget_in_engine(held)
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                await self._release(held.lease)
        except TimeoutError:
            return False
        self._remove(held)
        return True

    async def until_idle(self) -> None:
        """Return once nothing is held."""
        while len(self.held):
            self.room.clear()
            await self.room.wait()

    async def _release(self, lease: Lease) -> None:
        backoff = Backoff()
        while True:
            try:
                await self.queue.release(lease)
            except QueueUnavailable:
                await asyncio.sleep(backoff.next())
            else:
                return

    def _take(self, lease: Lease) -> Held:
        """An older attempt of the same request that is still here has lost its lease."""
        for older in self.held.of([lease.request.request_id]):
            self.lose(older)
        return self.held.add(lease)

    def _on_outputs(self, outputs: Sequence[EngineOutput]) -> None:
        for output in outputs:
            held = self.held.get(output.request_id)
            if held is None or held.answered:
                continue
            event = to_event(output, held.lease.request, self.name)
            held.started = held.started or isinstance(output, StartedOutput)
            held.answered = isinstance(event, Finished | Failed | Cancelled)
            self.outbox.put(held, event)
            if held.answered:
                self.room.set()

    def _on_crash(self, error: Exception) -> None:
        running = [held.request_id for held in self.held if not held.answered]
        _log.error("engine_crashed", running=running, exc_info=error)
        self.crashed.set()

    def _settled(self, held: Held, kept: bool) -> None:
        if kept:
            self._remove(held)
        else:
            self.lose(held)

    def _forget_in_engine(self, held: Held) -> None:
        key = held.key
        self.thread.tell(lambda engine: engine.cancel([key]))

    def _remove(self, held: Held) -> None:
        self.held.remove(held)
        self.room.set()


def _add(engine: Engine, held: Held) -> RequestRefused | None:
    lease, request = held.lease, held.lease.request
    try:
        engine.add(
            engine_key(lease),
            request.prompt_ids,
            request.sampling,
            adapter=request.adapter,
            priority=REQUEST_CLASSES.index(request.request_class),
            cache_scope=request.cache_scope or request.tenant,
            shared_tokens=request.shared_tokens,
            predicted_output=lease.predicted_tokens or None,
            stream=request.stream,
        )
    except RequestRefused as error:
        return error
    return None
