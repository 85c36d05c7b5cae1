"""Bring a database to this release's schema."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Dialect, MetaData, Table, create_engine, event, inspect, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.engine.interfaces import ReflectedColumn
from sqlalchemy.exc import CompileError

from gateway.kit.database import sqlite_file

_LOCK = 0x6261_7474_656E  # "batten": one migration at a time per Postgres database


class ForeignSchema(Exception):
    """The database is marked as this release's, and has other tables, or columns of another name
    or type."""


def migrate(url: str) -> None:
    """Idempotent, and safe when several processes start at once: the first one works, the
    others wait. Blocks: use a thread within an event loop. Raises ForeignSchema."""
    with migration_transaction(sync_url(url)) as connection:
        command.upgrade(config(connection), "head")


def check_schema(connection: Connection, metadata: MetaData) -> None:
    """Raises ForeignSchema. Tables that are not in `metadata` are none of our business."""
    found = inspect(connection).get_multi_columns(filter_names=list(metadata.tables))
    columns = {name: each for (_, name), each in found.items()}
    differing = sorted(
        name
        for name, table in metadata.tables.items()
        if not _has_columns(table, columns.get(name, []), connection.dialect)
    )
    if differing:
        raise ForeignSchema(
            "the database was made by an unreleased version of Batten, with other tables "
            f"({', '.join(differing)}), and cannot be upgraded: remove it with the store and the "
            "Redis that belong to it (`make demo` and `make serve` keep all in .demo), or name a "
            "new one (BATTEN_DATA, DATABASE_URL)"
        )


def _has_columns(table: Table, found: Sequence[ReflectedColumn], dialect: Dialect) -> bool:
    wanted = {(each.name, each.type.compile(dialect), each.nullable) for each in table.c}
    try:
        return wanted == {
            (each["name"], each["type"].compile(dialect), each["nullable"]) for each in found
        }
    except CompileError:  # a type that SQLAlchemy does not know
        return False


def sync_url(url: str) -> URL:
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        return parsed.set(drivername="sqlite+pysqlite")
    return parsed.set(drivername="postgresql+psycopg")


def config(connection: Connection) -> Config:
    """Alembic's configuration, without a file."""
    result = Config()
    result.set_main_option("script_location", str(files("migrations")))
    result.attributes["connection"] = connection
    return result


@contextmanager
def migration_transaction(url: URL) -> Iterator[Connection]:
    """A transaction that one process at a time is in."""
    engine = create_engine(url)
    is_sqlite = url.get_backend_name() == "sqlite"
    if is_sqlite:
        if file := sqlite_file(url):
            file.parent.mkdir(parents=True, exist_ok=True)
        event.listen(engine, "connect", _manual_transactions)
        event.listen(engine, "begin", _begin_immediate)
    try:
        with engine.begin() as connection:
            if not is_sqlite:
                connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
            yield connection
    finally:
        engine.dispose()


def _manual_transactions(connection: Any, _record: Any) -> None:
    connection.isolation_level = None
    connection.execute("PRAGMA busy_timeout=60000")


def _begin_immediate(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")
