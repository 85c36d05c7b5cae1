"""The two databases of a system under test, and what may happen to them."""

from __future__ import annotations

import sqlite3
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol

import psycopg

from tests.servers import PostgresServer

Rows = list[tuple[Any, ...]]


class Database(Protocol):
    url: str

    def query(self, sql: str, *values: object) -> Rows: ...

    def harm(self, kind: str) -> None:
        """`crash`: gone and back again; `disconnect`: nobody stays connected."""

    def heal(self) -> None: ...

    def close(self) -> None: ...


class Postgres:
    def __init__(self) -> None:
        self._server = PostgresServer()
        self._where = {"host": str(self._server.home), "user": "postgres", "dbname": "postgres"}
        self.url = f"postgresql://postgres@/postgres?host={self._server.home}"

    def query(self, sql: str, *values: object) -> Rows:
        with psycopg.connect(**self._where) as connection:
            rows = connection.execute(sql.replace("?", "%s"), values).fetchall()  # type: ignore[arg-type]
        return [tuple(int(v) if isinstance(v, Decimal) else v for v in row) for row in rows]

    def harm(self, kind: str) -> None:
        if kind == "crash":
            self._server.crash()
        else:
            self._server.disconnect_all()

    def heal(self) -> None:
        if not self._server.runs:
            self._server.start()

    def close(self) -> None:
        self._server.close()


class Sqlite:
    """Nothing to crash: a writer that does not let go stands for it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._writer: sqlite3.Connection | None = None
        self.url = f"sqlite:///{file}"

    def query(self, sql: str, *values: object) -> Rows:
        with sqlite3.connect(f"file:{self._file}?mode=ro", uri=True) as database:
            return database.execute(sql, values).fetchall()

    def harm(self, kind: str) -> None:
        self._writer = sqlite3.connect(self._file, timeout=30, isolation_level=None)
        self._writer.execute("BEGIN IMMEDIATE")

    def heal(self) -> None:
        if self._writer is not None:
            self._writer.rollback()
            self._writer.close()
            self._writer = None

    def close(self) -> None:
        self.heal()
