from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import func, select

from gateway.kit.database import ReadSession, WriteSession
from gateway.kit.pagination import Page, PageRequest, fetch_page
from gateway.models import Account, ApiKey, Batch, Tenant, UsageRecord


class TenantRepository:
    """Tenants and keys, for operators: not bound to one tenant."""

    def __init__(self, session: ReadSession | WriteSession) -> None:
        self._session = session

    async def get(self, tenant_id: str) -> Tenant | None:
        return await self._session.get(Tenant, tenant_id)

    async def named(self, name: str) -> Tenant | None:
        return await self._session.scalar(select(Tenant).where(Tenant.name == name))

    async def page(self, page: PageRequest) -> Page[Tenant]:
        return await fetch_page(self._session, Tenant, select(Tenant), page)

    async def key(self, key_id: str) -> ApiKey | None:
        return await self._session.get(ApiKey, key_id)

    async def keys(self, tenant_id: str | None, page: PageRequest) -> Page[ApiKey]:
        rows = select(ApiKey)
        if tenant_id is not None:
            rows = rows.where(ApiKey.tenant_id == tenant_id)
        return await fetch_page(self._session, ApiKey, rows, page)

    async def keys_of(self, tenant_id: str | None) -> Sequence[ApiKey]:
        """All of a tenant, or with None of the operators; newest first."""
        rows = select(ApiKey).where(ApiKey.tenant_id == tenant_id)
        return (await self._session.scalars(rows.order_by(ApiKey.id.desc()))).all()

    async def all(self) -> Sequence[Tenant]:
        return (await self._session.scalars(select(Tenant).order_by(Tenant.name))).all()

    async def used_since(self, tenant_id: str, what: str, since: int) -> int:
        """`requests` or `tokens` of calls and jobs answered since then (milliseconds), or `batches`
        created."""
        if what == "batches":
            made = select(func.count()).select_from(Batch)
            rows = made.where(Batch.tenant_id == tenant_id, Batch.created_at >= since)
            return int(await self._session.scalar(rows) or 0)
        tokens = func.sum(UsageRecord.prompt_tokens + UsageRecord.completion_tokens)
        used = tokens if what == "tokens" else func.count(UsageRecord.request_id)
        rows = select(used).where(
            UsageRecord.tenant_id == tenant_id,
            UsageRecord.created_at >= since,
            UsageRecord.batch_id.is_(None),
        )
        return int(await self._session.scalar(rows) or 0)

    def add(self, row: Tenant | ApiKey | Account) -> None:
        self._session.add(row)
