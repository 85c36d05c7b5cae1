from __future__ import annotations

from sqlalchemy import func, select

from gateway.kit.database import ReadSession, WriteSession
from gateway.kit.pagination import Page, PageRequest, fetch_page
from gateway.models import Adapter, AdapterRevision, SystemPrompt
from worker.protocol.types import SharedPrefix


class SystemPromptRepository:
    """The operator's, for all tenants. Deleted ones stay as rows, so that counts tell a change."""

    def __init__(self, session: ReadSession | WriteSession) -> None:
        self._session = session

    async def get(self, prompt_id: str, lock: bool = False) -> SystemPrompt | None:
        rows = select(SystemPrompt).where(
            SystemPrompt.id == prompt_id, SystemPrompt.deleted_at.is_(None)
        )
        return await self._session.scalar(rows.with_for_update() if lock else rows)

    async def page(self, page: PageRequest) -> Page[SystemPrompt]:
        rows = select(SystemPrompt)
        living = rows.where(SystemPrompt.deleted_at.is_(None))
        return await fetch_page(self._session, SystemPrompt, living, page, cursors=rows)

    async def adapter(self, digest: str, base_model: str) -> AdapterRevision | None:
        """The newest ready revision of that content, whoever's it is."""
        rows = (
            select(AdapterRevision)
            .join(Adapter, Adapter.id == AdapterRevision.adapter_id)
            .where(
                AdapterRevision.digest == digest,
                AdapterRevision.status == "ready",
                Adapter.base_model == base_model,
                Adapter.deleted_at.is_(None),
            )
            .order_by(AdapterRevision.created_at.desc())
        )
        return await self._session.scalar(rows.limit(1))

    async def version(self) -> tuple[int, int]:
        """Changes with every creation and deletion."""
        counts = select(func.count(), func.count(SystemPrompt.deleted_at))
        row = (await self._session.execute(counts.select_from(SystemPrompt))).one()
        return row[0], row[1]

    async def prefixes(self) -> list[tuple[str, SharedPrefix]]:
        """(base model, prefix) of those that live, the oldest first."""
        rows = select(SystemPrompt).where(SystemPrompt.deleted_at.is_(None))
        found = await self._session.scalars(rows.order_by(SystemPrompt.created_at, SystemPrompt.id))
        return [
            (row.base_model, SharedPrefix(tuple(row.token_ids), row.adapter_digest or ""))
            for row in found
        ]

    def add(self, row: SystemPrompt) -> None:
        self._session.add(row)
