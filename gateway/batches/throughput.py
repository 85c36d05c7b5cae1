"""How fast and how long answers were lately, for estimates."""

from __future__ import annotations

from sqlalchemy import func, select

from gateway.auth.scope import TenantScope
from gateway.kit.clock import now_ms
from gateway.kit.database import ReadSession
from gateway.models import Request, UsageRecord
from gateway.models.request import is_queued

_LATELY_MS = 24 * 3600 * 1000
_RECENT = 1000
_LEAST_SPAN_SECONDS = 1.0


class ThroughputRepository:
    """One tenant's recent answers."""

    def __init__(self, session: ReadSession, scope: TenantScope) -> None:
        self._session = session
        self._scope = scope

    async def share_of_max_tokens(self, model: str) -> float:
        """Completion tokens as a share of `max_tokens`, at most 1; 1 when nothing is known."""
        recent = (
            select(UsageRecord.completion_tokens, Request.max_tokens)
            .join(Request, Request.id == UsageRecord.request_id)
            .where(
                UsageRecord.tenant_id == self._scope.tenant_id,
                UsageRecord.created_at >= now_ms() - _LATELY_MS,
                UsageRecord.model == model,
            )
            .order_by(UsageRecord.created_at.desc())
            .limit(_RECENT)
            .subquery()
        )
        sums = select(func.sum(recent.c.completion_tokens), func.sum(recent.c.max_tokens))
        used, allowed = (await self._session.execute(sums)).one()
        return min(1.0, float(used) / float(allowed)) if allowed else 1.0

    async def tokens_per_second(self, base_model: str) -> float:
        """Of the tenant's last answers in 24 hours, from the start of the first to the end of
        the last; 0 when there are none."""
        recent = (
            select(
                (UsageRecord.prompt_tokens + UsageRecord.completion_tokens).label("tokens"),
                Request.started_at,
                Request.finished_at,
            )
            .join(Request, Request.id == UsageRecord.request_id)
            .where(
                UsageRecord.tenant_id == self._scope.tenant_id,
                UsageRecord.created_at >= now_ms() - _LATELY_MS,
                UsageRecord.base_model == base_model,
            )
            .order_by(UsageRecord.created_at.desc())
            .limit(_RECENT)
            .subquery()
        )
        row = await self._session.execute(
            select(
                func.sum(recent.c.tokens),
                func.min(func.coalesce(recent.c.started_at, recent.c.finished_at)),
                func.max(recent.c.finished_at),
            )
        )
        tokens, began, ended = row.one()
        if not tokens:
            return 0.0
        span: float = max(_LEAST_SPAN_SECONDS, (ended - began) / 1000)
        return float(tokens) / span

    async def backlog(self, base_model: str) -> int:
        """Prompt tokens and `max_tokens` of the tenant's requests that wait."""
        total = await self._session.scalar(
            select(func.sum(Request.prompt_tokens + Request.max_tokens)).where(
                Request.base_model == base_model,
                Request.tenant_id == self._scope.tenant_id,
                is_queued(),
            )
        )
        return int(total or 0)
