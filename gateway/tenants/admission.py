"""Whether a tenant's next request may come in now, and what the response says of its limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import structlog
from fastapi import Depends, Request

from gateway.auth.dependencies import CurrentPrincipal
from gateway.auth.limits import Limits
from gateway.auth.principal import Principal
from gateway.errors import TooManyRequests
from gateway.kit.clock import now_ms
from gateway.kit.context import Context
from gateway.kit.dependencies import AppContext
from gateway.kit.rates import HOUR_SECONDS, Bucket, Taken
from gateway.tenants.repository import TenantRepository
from worker.queue.base import QueueUnavailable

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Admission:
    """One call's. `headers` are added to its response, whatever becomes of it."""

    context: Context
    principal: Principal
    headers: dict[str, str]

    async def admit(self, tokens: int) -> None:
        """Counts one request of so many tokens. Raises TooManyRequests."""
        limits = self.principal.limits
        wanted = (
            ("requests", limits.requests_per_minute, 1),
            ("tokens", limits.tokens_per_minute, tokens),
        )
        buckets = [Bucket(name, limit, cost) for name, limit, cost in wanted if limit is not None]
        taken = await self._take(buckets) if buckets else None
        if taken is not None and taken.wait_ms:
            raise _refusal(limits, tokens, taken)

    async def admit_batch(self) -> None:
        """Counts the creation of a batch. Raises TooManyRequests."""
        limits = self.principal.limits
        most = limits.batches_per_hour or self.context.settings.batches_per_hour
        taken = await self._take([Bucket("batches", most, 1, HOUR_SECONDS)])
        if taken is not None and taken.wait_ms:
            seconds = -(-taken.wait_ms // 1000)
            raise TooManyRequests(
                f"Rate limit reached: {most} batches per hour. Please try again in {seconds}s.",
                retry_after=seconds,
            )

    async def _take(self, buckets: Sequence[Bucket]) -> Taken | None:
        """None without Redis: then nothing is refused."""
        rates, tenant_id = self.context.queues.rates, self.principal.tenant_id
        try:
            taken = await rates.take(tenant_id, buckets)
            if taken is None:
                taken = await rates.take(tenant_id, buckets, await self._used(buckets))
        except QueueUnavailable as error:
            _log.warning("limits_not_counted", error=str(error))
            return None
        assert taken is not None  # what was used is given
        self.headers.update(_headers(buckets, taken))
        return taken

    async def _used(self, buckets: Sequence[Bucket]) -> list[int]:
        async with self.context.database.read() as session:
            repository = TenantRepository(session)
            return [
                await repository.used_since(
                    self.principal.tenant_id, bucket.name, now_ms() - bucket.window_seconds * 1000
                )
                for bucket in buckets
            ]


async def current_admission(
    request: Request, context: AppContext, principal: CurrentPrincipal
) -> Admission:
    headers: dict[str, str] = {}
    request.scope.setdefault("state", {})["response_headers"] = headers
    return Admission(context, principal, headers)


CurrentAdmission = Annotated[Admission, Depends(current_admission)]


def _headers(buckets: Sequence[Bucket], taken: Taken) -> dict[str, str]:
    headers = {}
    for bucket, remaining, reset in zip(buckets, taken.remaining, taken.reset_ms, strict=True):
        headers[f"x-ratelimit-limit-{bucket.name}"] = str(bucket.limit)
        headers[f"x-ratelimit-remaining-{bucket.name}"] = str(remaining)
        headers[f"x-ratelimit-reset-{bucket.name}"] = _duration(reset)
    return headers


def _duration(milliseconds: int) -> str:
    """As OpenAI writes it: 120ms, 7s, 1m0s."""
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, seconds = divmod(-(-milliseconds // 1000), 60)
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"


def _refusal(limits: Limits, tokens: int, taken: Taken) -> TooManyRequests:
    most = limits.tokens_per_minute
    if most is not None and tokens > most:
        message = f"This request is too large: it may need {tokens} tokens, your limit is {most}"
        return TooManyRequests(f"{message} tokens per minute.", code="request_too_large")
    seconds = -(-taken.wait_ms // 1000)
    return TooManyRequests(
        f"Rate limit reached: {limits.requests_per_minute or 'any number of'} requests and "
        f"{most or 'any number of'} tokens per minute. Please try again in {seconds}s.",
        retry_after=seconds,
    )
