"""Whether a tenant's next request may come in now, and what the response says of its limits."""

from __future__ import annotations

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
from gateway.kit.rates import WINDOW_SECONDS, Bucket, Taken
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
        """Counts one request of so many tokens. Without Redis nothing is refused. Raises
        TooManyRequests."""
        limits = self.principal.limits
        if limits.requests_per_minute is None and limits.tokens_per_minute is None:
            return
        try:
            taken = await self._take(limits, tokens)
        except QueueUnavailable as error:
            _log.warning("limits_not_counted", error=str(error))
            return
        self.headers.update(_headers(limits, taken))
        if taken.wait_ms:
            raise _refusal(limits, tokens, taken)

    async def _take(self, limits: Limits, tokens: int) -> Taken:
        rates, tenant_id = self.context.queues.rates, self.principal.tenant_id
        buckets = (
            Bucket(limits.requests_per_minute or 0, 1),
            Bucket(limits.tokens_per_minute or 0, tokens),
        )
        taken = await rates.take(tenant_id, *buckets)
        if taken is None:
            async with self.context.database.read() as session:
                since = now_ms() - WINDOW_SECONDS * 1000
                used = await TenantRepository(session).used_since(tenant_id, since)
            taken = await rates.take(tenant_id, *buckets, used)
        assert taken is not None  # the buckets were given
        return taken


async def current_admission(
    request: Request, context: AppContext, principal: CurrentPrincipal
) -> Admission:
    headers: dict[str, str] = {}
    request.scope.setdefault("state", {})["response_headers"] = headers
    return Admission(context, principal, headers)


CurrentAdmission = Annotated[Admission, Depends(current_admission)]


def _headers(limits: Limits, taken: Taken) -> dict[str, str]:
    headers = {}
    named = {"requests": limits.requests_per_minute, "tokens": limits.tokens_per_minute}
    for (name, limit), remaining, reset in zip(
        named.items(), taken.remaining, taken.reset_ms, strict=True
    ):
        if limit is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(remaining)
            headers[f"x-ratelimit-reset-{name}"] = _duration(reset)
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
