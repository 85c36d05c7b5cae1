"""`Idempotency-Key`: the same POST again gives the first answer and does nothing.

The key's row is inserted in the transaction that does the work, so there is no state "in
progress": a second call waits for the first one's commit (Postgres: the unique index, SQLite:
the write lock), and a failed call leaves the key free.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from fastapi import Depends, Header, Request
from fastapi.responses import JSONResponse
from sqlalchemy import delete, select

from gateway.auth.dependencies import CurrentPrincipal
from gateway.auth.scope import TenantScope
from gateway.errors import Conflict
from gateway.kit.clock import now_ms
from gateway.kit.database import WriteSession
from gateway.kit.sql import insert_ignoring
from gateway.models import IdempotencyKey

KEPT_MS = 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class Idempotency:
    """One call, and the key it came with, if any."""

    scope: TenantScope
    path: str
    key: str | None

    async def once(
        self,
        session: WriteSession,
        fingerprint: str,
        create: Callable[[], Awaitable[dict[str, Any]]],
        status: int = 200,
    ) -> JSONResponse:
        """`create` runs within `session` and returns the body. Send the response after the
        session's block. Raises Conflict (`idempotency_conflict`), and what `create` raises."""
        if self.key is None:
            return JSONResponse(await create(), status)
        if not await self._claim(session, fingerprint):
            return self._replay(await self._first(session), fingerprint)
        body = await create()
        row = await self._first(session)
        row.status, row.response = status, body
        return JSONResponse(body, status)

    async def _claim(self, session: WriteSession, fingerprint: str) -> bool:
        statement = (
            insert_ignoring(session, IdempotencyKey)
            .values(
                tenant_id=self.scope.tenant_id,
                path=self.path,
                key=self.key,
                fingerprint=fingerprint,
                created_at=now_ms(),
            )
            .returning(IdempotencyKey.key)
        )
        return await session.scalar(statement) is not None

    async def _first(self, session: WriteSession) -> IdempotencyKey:
        rows = select(IdempotencyKey).where(
            IdempotencyKey.tenant_id == self.scope.tenant_id,
            IdempotencyKey.path == self.path,
            IdempotencyKey.key == self.key,
        )
        return (await session.scalars(rows)).one()

    def _replay(self, row: IdempotencyKey, fingerprint: str) -> JSONResponse:
        if row.fingerprint != fingerprint or row.status is None:
            raise Conflict(
                f"The Idempotency-Key '{self.key}' was used before with another request.",
                code="idempotency_conflict",
            )
        return JSONResponse(row.response, row.status, {"Idempotent-Replayed": "true"})


async def current_idempotency(
    request: Request,
    principal: CurrentPrincipal,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
) -> Idempotency:
    return Idempotency(principal.scope, request.url.path, idempotency_key)


CurrentIdempotency = Annotated[Idempotency, Depends(current_idempotency)]


async def body_fingerprint(request: Request) -> str:
    """Of a JSON body, whatever the order of its keys."""
    body = await request.body()
    return fingerprint(msgspec.json.encode(msgspec.json.decode(body or b"null"), order="sorted"))


def fingerprint(*parts: str | bytes | None) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = b"-" if part is None else part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


async def forget_old_keys(session: WriteSession) -> None:
    """For a sweep: keys older than a day may be used again."""
    before = now_ms() - KEPT_MS
    await session.execute(delete(IdempotencyKey).where(IdempotencyKey.created_at < before))
