"""SQL sessions: one transaction each, committed at the end of the block, read or write.

SQLite runs in WAL mode and writers begin with BEGIN IMMEDIATE, so that a transaction that reads
before it writes never fails half way. Postgres uses its defaults (READ COMMITTED).
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NewType
from urllib.parse import unquote, urlsplit

from sqlalchemy import event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)

ReadSession = NewType("ReadSession", AsyncSession)
WriteSession = NewType("WriteSession", AsyncSession)

BUSY_TIMEOUT_MS = 30_000
QUEUE_SECONDS = 120.0
"""Longest wait for a session of SQLite: a thousand writers in a row are no failure."""


def async_url(url: str) -> str:
    """`sqlite:` and `postgres:` URLs with the drivers that we ship. Raises ValueError."""
    parsed = make_url(url)
    match parsed.get_backend_name():
        case "sqlite":
            return parsed.set(drivername="sqlite+aiosqlite").render_as_string(False)
        case "postgresql" | "postgres":
            return parsed.set(drivername="postgresql+psycopg").render_as_string(False)
        case other:
            raise ValueError(f"DATABASE_URL names {other!r}; use sqlite:///… or postgresql://…")


def sqlite_file(url: URL) -> Path | None:
    """Where SQLite keeps the database of `url`; None of another server's."""
    if url.get_backend_name() != "sqlite" or not url.database:
        return None
    if url.database.startswith("file:") and "uri" in url.query:  # https://sqlite.org/uri.html
        return Path(unquote(urlsplit(url.database).path))
    return Path(url.database)


class Database:
    """Where sessions come from. Close it in the event loop that used it."""

    def __init__(self, url: str, pool_size: int = 10) -> None:
        self.is_sqlite = make_url(url).get_backend_name() == "sqlite"
        self._writer = _engine(async_url(url), self.is_sqlite, "BEGIN IMMEDIATE", pool_size)
        self._reader = (
            _engine(async_url(url), True, "BEGIN", pool_size) if self.is_sqlite else self._writer
        )
        self._write = async_sessionmaker(self._writer, expire_on_commit=False)
        self._read = async_sessionmaker(self._reader, expire_on_commit=False)

    @asynccontextmanager
    async def write(self) -> AsyncIterator[WriteSession]:
        async with self._write() as session, session.begin():
            yield WriteSession(session)

    @asynccontextmanager
    async def read(self) -> AsyncIterator[ReadSession]:
        async with self._read() as session:
            yield ReadSession(session)

    @property
    def engine(self) -> AsyncEngine:
        return self._writer

    async def close(self) -> None:
        await self._writer.dispose()
        if self._reader is not self._writer:
            await self._reader.dispose()


async def repeatable(session: ReadSession) -> None:
    """Call first: the session then sees one moment of the database. (SQLite always does so.)"""
    if session.get_bind().dialect.name != "sqlite":
        await session.connection(execution_options={"isolation_level": "REPEATABLE READ"})


class _RollsBack(sqlite3.Connection):
    """A connection that is closed in the middle of a statement, as a cancelled task does it, lives
    on until the statement is collected, and keeps the write lock: so let go of it first."""

    def close(self) -> None:
        if self.in_transaction:
            self.rollback()
        super().close()


def _engine(url: str, is_sqlite: bool, begin: str, pool_size: int) -> AsyncEngine:
    if not is_sqlite:
        return create_async_engine(url, pool_size=pool_size, pool_pre_ping=True)
    # SQLite has one writer at a time: those of a process queue up here, in order, and not in
    # its busy handler, which sleeps.
    size, more = (1, 0) if begin == "BEGIN IMMEDIATE" else (pool_size, pool_size)
    engine = create_async_engine(
        url,
        pool_size=size,
        max_overflow=more,
        pool_timeout=QUEUE_SECONDS,
        connect_args={"factory": _RollsBack},
    )

    @event.listens_for(engine.sync_engine, "connect")
    def configure(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver must not begin transactions of its own
        cursor = connection.cursor()
        for pragma in (
            f"busy_timeout={BUSY_TIMEOUT_MS}",
            "journal_mode=WAL",
            "synchronous=NORMAL",
            "foreign_keys=ON",
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def start(connection: Any) -> None:
        connection.exec_driver_sql(begin)

    return engine
