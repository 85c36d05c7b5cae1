"""Sends what is due: claims, sends many at once, records, until nothing is due or time is up.

    claim (compare-and-set) → send → one transaction: delivery, attempt, circuit breaker

A crash between sending and recording sends again, with the same `webhook-id`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import structlog

from gateway.kit.clock import now_ms, seconds
from gateway.kit.context import Context
from gateway.kit.locks import exclusive
from gateway.webhooks.claims import Claim, claim, due_endpoints
from gateway.webhooks.metrics import counts_of
from gateway.webhooks.outcomes import Attempted, record_outcomes
from gateway.webhooks.secrets import WrongSecretKey, reveal
from gateway.webhooks.sending import Outcome, Sender
from gateway.webhooks.shares import Busy, shares
from gateway.webhooks.signing import signed_headers

BUDGET_SECONDS = 25.0
STOP_SECONDS = 5.0
_LOOK_AGAIN_SECONDS = 1.0
_GATHER_SECONDS = 0.02

_log = structlog.get_logger(__name__)


async def deliver(context: Context, is_stopping: Callable[[], bool] = lambda: False) -> int:
    """Returns how many attempts were made. Once `is_stopping` nothing new is taken, and what is
    on its way has some seconds."""
    async with AsyncExitStack() as stack:
        sender = Sender(context.settings)
        stack.push_async_callback(sender.close)
        deliverer = Deliverer(context, sender, is_stopping)
        stack.push_async_callback(deliverer.stop)
        # Of the processes that share a data directory one takes deliveries, and one may still
        # wait for its last: receivers never keep all of them from other work.
        with exclusive(context.settings.data / "webhooks.lock") as ours:
            if ours:
                await deliverer.take_for(BUDGET_SECONDS)
        await deliverer.drain()
    return deliverer.attempts


class Deliverer:
    def __init__(
        self, context: Context, sender: Sender, is_stopping: Callable[[], bool] = lambda: False
    ) -> None:
        self.attempts = 0
        self._is_stopping = is_stopping
        self._context = context
        self._sender = sender
        self._on_way: dict[asyncio.Task[Outcome], Claim] = {}

    async def take_for(self, seconds: float) -> None:
        """Until nothing is due, or on its way."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._is_stopping():
            await self._take()
            if not self._on_way:
                return
            await self._record_ended()

    async def drain(self) -> None:
        until = None
        while self._on_way and (until is None or time.monotonic() < until):
            if until is None and self._is_stopping():
                until = time.monotonic() + STOP_SECONDS
            await self._record_ended()

    async def stop(self) -> None:
        """What is still on its way comes due again when its lease is over."""
        for task in self._on_way:
            task.cancel()
        await asyncio.gather(*self._on_way, return_exceptions=True)

    async def _take(self) -> None:
        now = now_ms()
        async with self._context.database.read() as session:
            due = await due_endpoints(session, now)
        places = shares(due, self._busy(), self._context.settings)
        if not places:
            return
        async with self._context.database.write() as session:
            claims = await claim(session, places, now, self._lease_ms)
        for each in claims:
            self._on_way[asyncio.create_task(self._send(each))] = each

    async def _record_ended(self) -> None:
        """Waits a moment for more, so that they share a transaction."""
        await asyncio.wait(
            self._on_way, timeout=_LOOK_AGAIN_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        await asyncio.sleep(_GATHER_SECONDS)
        ended = [task for task in self._on_way if task.done()]
        if not ended:
            return
        attempted = [Attempted(self._on_way[task], task.result()) for task in ended]
        async with self._context.database.write() as session:
            finished = await record_outcomes(session, attempted, self._context.settings)
        for task in ended:
            del self._on_way[task]
        self.attempts += len(attempted)
        _report(attempted)
        await self._context.queues.statistics.add_or_lose(counts_of(attempted, finished))

    async def _send(self, each: Claim) -> Outcome:
        body, now = each.body.encode(), now_ms()
        try:
            secrets = [reveal(self._context.secret_key, row) for row in each.secrets]
        except WrongSecretKey as error:
            _log.error("webhook_not_signed", delivery_id=each.delivery_id, error=str(error))
            return Outcome(error="not_signed", at=now)
        if not secrets:
            return Outcome(error="not_signed", at=now)
        headers = signed_headers(each.event_id, body, secrets, seconds(now) or 0)
        return await self._sender.send(each.url, body, headers)

    def _busy(self) -> Busy:
        claims = self._on_way.values()
        return Busy(
            Counter(each.endpoint_id for each in claims), Counter(each.tenant_id for each in claims)
        )

    @property
    def _lease_ms(self) -> int:
        """Longer than an attempt and its record take."""
        return round(2000 * self._context.settings.webhook_timeout_seconds) + 30_000


def _report(attempted: Sequence[Attempted]) -> None:
    for each in attempted:
        _log.info(
            "webhook_attempt",
            tenant_id=each.claim.tenant_id,
            delivery_id=each.claim.delivery_id,
            event_id=each.claim.event_id,
            number=each.claim.number,
            status=each.outcome.status_code,
            error=each.outcome.error,
            milliseconds=each.outcome.duration_ms,
        )
