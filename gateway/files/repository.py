from __future__ import annotations

from sqlalchemy import Select, or_, select, update

from gateway.auth.scope import TenantScope
from gateway.kit.clock import now_ms
from gateway.kit.database import ReadSession, WriteSession
from gateway.kit.pagination import Page, PageRequest, fetch_page
from gateway.models import File


class FileRepository:
    """One tenant's files."""

    def __init__(self, session: ReadSession | WriteSession, scope: TenantScope) -> None:
        self._session = session
        self._scope = scope

    def _all(self) -> Select[File]:
        return select(File).where(File.tenant_id == self._scope.tenant_id)

    def _visible(self) -> Select[File]:
        unexpired = or_(File.expires_at.is_(None), File.expires_at > now_ms())
        return self._all().where(File.deleted_at.is_(None), unexpired)

    async def get(self, file_id: str) -> File | None:
        return await self._session.scalar(self._visible().where(File.id == file_id))

    async def page(self, page: PageRequest, purpose: str | None) -> Page[File]:
        rows = self._visible()
        if purpose is not None:
            rows = rows.where(File.purpose == purpose)
        return await fetch_page(self._session, File, rows, page, cursors=self._all())

    async def hide(self, file_id: str) -> bool:
        """False when there is nothing (any more) to hide."""
        hidden = (
            update(File)
            .where(File.id == file_id, File.tenant_id == self._scope.tenant_id)
            .where(File.deleted_at.is_(None))
            .values(deleted_at=now_ms())
            .returning(File.id)
        )
        return await self._session.scalar(hidden) is not None

    def add(self, file: File) -> None:
        self._session.add(file)
