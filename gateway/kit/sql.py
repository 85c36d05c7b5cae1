"""Statements that both databases know, but SQLAlchemy spells once per dialect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Insert, String, Text, bindparam, func, inspect, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import DeclarativeBase
from sqlalchemy.sql.elements import ColumnElement
from sqlalchemy.types import TypeEngine

from gateway.kit.database import ReadSession, WriteSession


def insert_ignoring(session: ReadSession | WriteSession, model: type[DeclarativeBase]) -> Insert:
    """INSERT … ON CONFLICT DO NOTHING; add `.values()` and `.returning()`, whose rows are
    those really inserted. On Postgres a concurrent insert of the same key is waited for."""
    dialect: Any = sqlite if session.get_bind().dialect.name == "sqlite" else postgresql
    statement: Insert = dialect.insert(model).on_conflict_do_nothing()
    return statement


async def insert_new(
    session: WriteSession, table: type[DeclarativeBase], rows: Sequence[Mapping[str, Any]]
) -> list[Any]:
    """Inserts `rows`, all of the same columns. Returns the primary keys of those really inserted:
    rows whose key exists are left out."""
    if not rows:
        return []
    key = inspect(table).primary_key[0]
    statement = insert_ignoring(session, table).returning(key)
    if session.get_bind().dialect.name == "sqlite":
        return list(await session.scalars(statement, list(rows)))
    names = list(rows[0])
    arrays = select(*(_column(table, name, rows) for name in names))
    return list(await session.scalars(statement.from_select(names, arrays)))


def _column(
    table: type[DeclarativeBase], name: str, rows: Sequence[Mapping[str, Any]]
) -> ColumnElement[Any]:
    """One array for each column: the statement stays short and the same, whatever the number of
    rows, and the driver need not parse thousands of parameters."""
    kind: TypeEngine[Any] = table.__table__.columns[name].type
    if isinstance(kind, String):
        kind = Text()  # a cast to VARCHAR(n) would cut silently
    values = [row[name] for row in rows]
    return func.unnest(bindparam(None, values, type_=postgresql.ARRAY(kind, dimensions=1)))
