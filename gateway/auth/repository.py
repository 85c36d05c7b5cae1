from __future__ import annotations

from sqlalchemy import select

from gateway.kit.database import ReadSession, WriteSession
from gateway.models import ApiKey, Tenant


class CredentialRepository:
    """Keys by their hash: the one look-up that comes before any tenant is known."""

    def __init__(self, session: ReadSession | WriteSession) -> None:
        self._session = session

    async def find(self, key_hash: str) -> tuple[ApiKey, Tenant | None] | None:
        statement = (
            select(ApiKey, Tenant)
            .outerjoin(Tenant, Tenant.id == ApiKey.tenant_id)
            .where(ApiKey.hash == key_hash)
        )
        row = (await self._session.execute(statement)).one_or_none()
        return None if row is None else (row[0], row[1])
