from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Select, func, literal_column, select
from sqlalchemy.sql.elements import ColumnElement

from gateway.auth.scope import TenantScope
from gateway.kit.clock import now_ms
from gateway.kit.database import ReadSession, WriteSession
from gateway.kit.pagination import Page, PageRequest, fetch_page
from gateway.models import Request, Result, Tenant
from gateway.models.request import is_open, is_out

_IS_JOB: ColumnElement[bool] = literal_column("requests.kind = 'job'")
_STATES: dict[str, Sequence[str]] = {"queued": ("queued", "dispatched")}


class JobRepository:
    """One tenant's jobs and synchronous calls."""

    def __init__(self, session: ReadSession | WriteSession, scope: TenantScope) -> None:
        self._session = session
        self._scope = scope

    def _all(self) -> Select[Request]:
        return select(Request).where(Request.tenant_id == self._scope.tenant_id)

    async def job(self, job_id: str) -> Request | None:
        return await self._session.scalar(self._all().where(Request.id == job_id, _IS_JOB))

    async def lock_tenant(self) -> None:
        """Serialises decisions about how many jobs the tenant may have open."""
        tenant = select(Tenant.id).where(Tenant.id == self._scope.tenant_id)
        await self._session.execute(tenant.with_for_update(key_share=True))

    async def open_jobs(self) -> int:
        of_tenant = Request.tenant_id == self._scope.tenant_id
        count = select(func.count()).select_from(Request).where(of_tenant, _IS_JOB, is_open())
        return await self._session.scalar(count) or 0

    async def call(self, request_id: str) -> Request:
        """A synchronous call that is known to exist."""
        return (await self._session.scalars(self._all().where(Request.id == request_id))).one()

    async def page(self, page: PageRequest, status: str | None, model: str | None) -> Page[Request]:
        jobs = self._all().where(_IS_JOB)
        rows = jobs
        if status is not None:
            rows = rows.where(Request.state.in_(_STATES.get(status, (status,))))
        if model is not None:
            rows = rows.where(Request.model == model)
        return await fetch_page(self._session, Request, rows, page, cursors=jobs)

    async def result(self, request_id: str) -> Result | None:
        owned = select(Result).join(Request, Request.id == Result.request_id)
        return await self._session.scalar(
            owned.where(Result.request_id == request_id, Request.tenant_id == self._scope.tenant_id)
        )

    async def results(self, request_ids: Sequence[str]) -> dict[str, Result]:
        owned = select(Result).join(Request, Request.id == Result.request_id)
        rows = await self._session.scalars(
            owned.where(
                Result.request_id.in_(request_ids), Request.tenant_id == self._scope.tenant_id
            )
        )
        return {result.request_id: result for result in rows}

    async def outstanding(self, base_model: str, request_class: str, at_most: int) -> int:
        """How many are in the queue, counted no further than `at_most`."""
        some = (
            select(Request.id)
            .where(
                Request.base_model == base_model,
                Request.tenant_id == self._scope.tenant_id,
                Request.request_class == request_class,
                is_out(),
            )
            .limit(at_most)
        )
        return await self._session.scalar(select(func.count()).select_from(some.subquery())) or 0

    def add(self, row: Request) -> None:
        self._session.add(row)


async def overdue(session: ReadSession, limit: int) -> list[str]:
    """Ids of all tenants' open jobs and calls whose deadline has passed, the oldest first."""
    rows = await session.scalars(
        select(Request.id)
        .where(is_open(), Request.deadline_at <= now_ms(), Request.batch_id.is_(None))
        .order_by(Request.deadline_at)
        .limit(limit)
    )
    return list(rows)
