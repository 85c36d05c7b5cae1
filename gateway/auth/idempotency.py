"""`Idempotency-Key`: the same POST again gives the first answer and does nothing.

The key's row is inserted in the transaction that does the work, so there is no state "in
progress": a second call waits for the first one's commit (Postgres: the unique index, SQLite:
the write lock), and a failed call leaves the key free.

A tenant's keys are its own; operators share theirs. What is stored of an answer never holds a
secret: `Reveal` makes it again from a reference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from fastapi import Depends, Header, Request
from fastapi.responses import JSONResponse
from sqlalchemy import ColumnElement, delete, select

from gateway.auth.dependencies import AdminPrincipal, CurrentPrincipal
from gateway.errors import Conflict
from gateway.kit.clock import now_ms
from gateway.kit.database import Database, ReadSession, WriteSession
from gateway.kit.dependencies import AppContext
from gateway.kit.sql import insert_ignoring
from gateway.models import IdempotencyKey

IdempotencyHeader = Annotated[
    str | None, Header(alias="idempotency-key", min_length=1, max_length=255)
]
OPERATORS = "operators"
"""The owner of operators' keys, in place of a tenant's id."""

Body = dict[str, Any]
Create = Callable[[WriteSession], Awaitable[Body]]
Reveal = Callable[[WriteSession, Body], Awaitable[Body]]
"""From what is stored to what is answered."""

REPLAYED = {"Idempotent-Replayed": "true"}


@dataclass(frozen=True, slots=True)
class Recalled:
    """An answer; `replayed`: an earlier call's."""

    status: int
    body: Body
    replayed: bool = False

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, REPLAYED if self.replayed else None)


@dataclass(frozen=True, slots=True)
class Idempotency:
    """One call, and the key it came with, if any."""

    owner: str
    path: str
    key: str | None

    async def once(
        self,
        session: WriteSession,
        fingerprint: str,
        create: Callable[[], Awaitable[Body]],
        status: int = 200,
    ) -> JSONResponse:
        """`create` runs within `session` and returns the body. Send the response after the
        session's block. Raises Conflict (`idempotency_conflict`), and what `create` raises."""
        return (await self.recall(session, fingerprint, create, status)).response

    async def earlier(self, session: ReadSession, fingerprint: str) -> Recalled | None:
        """The answer of an earlier call with the key, if there is one. It is given whatever has
        become of what that call named: ask before looking anything up. Raises Conflict."""
        if self.key is None:
            return None
        row = await session.scalar(select(IdempotencyKey).where(*self._is_ours()))
        return None if row is None else self._replay(row, fingerprint)

    async def recall(
        self,
        session: WriteSession,
        fingerprint: str,
        create: Callable[[], Awaitable[Body]],
        status: int = 200,
    ) -> Recalled:
        """As `once`, for who makes a response of the body itself."""
        if self.key is None:
            return Recalled(status, await create())
        if not await self._claim(session, fingerprint):
            return self._replay(await self._first(session), fingerprint)
        body = await create()
        row = await self._first(session)
        row.status, row.response = status, body
        return Recalled(status, body)

    async def release(self, session: WriteSession, body: Body) -> None:
        """The answer `body` came to nothing: the same call may be made again. Where that has
        happened already, its key stays."""
        if self.key is None:
            return
        rows = select(IdempotencyKey).where(*self._is_ours()).with_for_update()
        row = await session.scalar(rows)
        if row is not None and row.response == body:
            await session.delete(row)

    async def _claim(self, session: WriteSession, fingerprint: str) -> bool:
        statement = (
            insert_ignoring(session, IdempotencyKey)
            .values(
                owner=self.owner,
                path=self.path,
                key=self.key,
                fingerprint=fingerprint,
                created_at=now_ms(),
            )
            .returning(IdempotencyKey.key)
        )
        return await session.scalar(statement) is not None

    async def _first(self, session: WriteSession) -> IdempotencyKey:
        return (await session.scalars(select(IdempotencyKey).where(*self._is_ours()))).one()

    def _is_ours(self) -> tuple[ColumnElement[bool], ...]:
        return (
            IdempotencyKey.owner == self.owner,
            IdempotencyKey.path == self.path,
            IdempotencyKey.key == self.key,
        )

    def _replay(self, row: IdempotencyKey, fingerprint: str) -> Recalled:
        if row.fingerprint != fingerprint or row.status is None:
            raise Conflict(
                f"The Idempotency-Key '{self.key}' was used before with another request.",
                code="idempotency_conflict",
            )
        return Recalled(row.status, row.response or {}, replayed=True)


async def current_idempotency(
    request: Request,
    principal: CurrentPrincipal,
    idempotency_key: IdempotencyHeader = None,
) -> Idempotency:
    return Idempotency(principal.tenant_id, _path(request), idempotency_key)


async def operator_idempotency(
    request: Request,
    operator: AdminPrincipal,
    idempotency_key: IdempotencyHeader = None,
) -> Idempotency:
    return Idempotency(OPERATORS, _path(request), idempotency_key)


def _path(request: Request) -> str:
    """A path's digest: of any length and all of its characters, it fits into an index."""
    return fingerprint(request.url.path)


CurrentIdempotency = Annotated[Idempotency, Depends(current_idempotency)]
OperatorIdempotency = Annotated[Idempotency, Depends(operator_idempotency)]


@dataclass(frozen=True, slots=True)
class Once:
    """A call with a JSON body whose work is one transaction."""

    database: Database
    idempotency: Idempotency
    fingerprint: str

    async def earlier(self) -> JSONResponse | None:
        """As `Idempotency.earlier`: for who must look something up before the transaction."""
        async with self.database.read() as session:
            recalled = await self.idempotency.earlier(session, self.fingerprint)
        return None if recalled is None else recalled.response

    async def answer(
        self, create: Create, status: int = 200, reveal: Reveal | None = None
    ) -> JSONResponse:
        """`create` does the work and returns the body, to be stored; `reveal` puts a secret into
        it. Raises Conflict (`idempotency_conflict`), and what the two raise."""
        async with self.database.write() as session:
            recalled = await self.idempotency.recall(
                session, self.fingerprint, lambda: create(session), status
            )
            if reveal is not None:
                recalled = replace(recalled, body=await reveal(session, dict(recalled.body)))
        return recalled.response


async def body_fingerprint(request: Request) -> str:
    """Of a JSON body, whatever the order of its keys. None is one that leaves out everything."""
    body = await request.body()
    return fingerprint(msgspec.json.encode(msgspec.json.decode(body or b"{}"), order="sorted"))


Fingerprint = Annotated[str, Depends(body_fingerprint)]


async def current_once(
    context: AppContext, idempotency: CurrentIdempotency, fingerprint: Fingerprint
) -> Once:
    return Once(context.database, idempotency, fingerprint)


async def operator_once(
    context: AppContext, idempotency: OperatorIdempotency, fingerprint: Fingerprint
) -> Once:
    return Once(context.database, idempotency, fingerprint)


CurrentOnce = Annotated[Once, Depends(current_once)]
OperatorOnce = Annotated[Once, Depends(operator_once)]


def fingerprint(*parts: str | bytes | None) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = b"-" if part is None else part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


async def forget_old_keys(session: WriteSession, hours: int) -> None:
    """For a sweep: keys older than that may be used again."""
    before = now_ms() - hours * 3_600_000
    await session.execute(delete(IdempotencyKey).where(IdempotencyKey.created_at < before))
