from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import func, or_, select

from gateway.kit.database import ReadSession, WriteSession
from gateway.kit.pagination import Page, PageRequest, fetch_page
from gateway.models import Adapter, AdapterRevision, StoragePrice


class StorageRepository:
    """What the adapters of all tenants take, and its price: for control processes."""

    def __init__(self, session: ReadSession | WriteSession) -> None:
        self._session = session

    async def stored(self, start: int, end: int) -> Sequence[tuple[str, int]]:
        """(tenant, bytes) of ready revisions kept all the time in [start, end), each content of a
        tenant once. The operator's own cost nobody anything."""
        contents = (
            select(AdapterRevision.tenant_id, AdapterRevision.digest, AdapterRevision.bytes)
            .join(Adapter, Adapter.id == AdapterRevision.adapter_id)
            .where(
                AdapterRevision.tenant_id.is_not(None),
                AdapterRevision.status == "ready",
                AdapterRevision.finished_at <= start,
                or_(Adapter.deleted_at.is_(None), Adapter.deleted_at >= end),
            )
            .distinct()
            .subquery()
        )
        rows = select(contents.c.tenant_id, func.sum(contents.c.bytes))
        rows = rows.group_by(contents.c.tenant_id).order_by(contents.c.tenant_id)
        return [(row[0], int(row[1])) for row in await self._session.execute(rows)]

    async def price_at(self, at: int) -> StoragePrice:
        """The newest that was set by then: the first release's is as old as time."""
        rows = select(StoragePrice).where(StoragePrice.created_at <= at)
        rows = rows.order_by(StoragePrice.created_at.desc(), StoragePrice.id.desc()).limit(1)
        return (await self._session.scalars(rows)).one()

    async def page(self, page: PageRequest) -> Page[StoragePrice]:
        return await fetch_page(self._session, StoragePrice, select(StoragePrice), page)
