"""Statements over many rows that both databases know, but SQLAlchemy spells once per dialect.

The rows travel as one JSON parameter: the statement is short and always the same, whatever their
number, and the database takes it apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
from sqlalchemy import (
    JSON,
    FromClause,
    Insert,
    String,
    Table,
    Text,
    bindparam,
    column,
    func,
    inspect,
    select,
    true,
    update,
)
from sqlalchemy import (
    cast as as_type,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import DeclarativeBase
from sqlalchemy.sql.elements import ColumnElement
from sqlalchemy.types import TypeEngine

from gateway.kit.database import ReadSession, WriteSession

Row = Mapping[str, Any]


def insert_ignoring(session: ReadSession | WriteSession, model: type[DeclarativeBase]) -> Insert:
    """INSERT … ON CONFLICT DO NOTHING; add `.values()` and `.returning()`, whose rows are
    those really inserted. On Postgres a concurrent insert of the same key is waited for."""
    statement: Insert = _dialect(session).insert(model.__table__).on_conflict_do_nothing()
    return statement


async def insert_new(
    session: WriteSession, model: type[DeclarativeBase], rows: Sequence[Row]
) -> list[Any]:
    """Inserts `rows`, all of the same columns. Returns the primary keys of those really inserted:
    rows whose key exists are left out."""
    if not rows:
        return []
    given = _Given(session, model, rows)
    new = select(*given.columns.values()).select_from(given.source).where(true())
    statement = insert_ignoring(session, model).from_select(list(given.columns), new)
    return list(await session.scalars(statement.returning(_key(model))))


async def add_rows(
    session: WriteSession, model: type[DeclarativeBase], rows: Sequence[Row], sums: Sequence[str]
) -> None:
    """Inserts `rows`, all of the same columns; of those whose key exists the columns `sums` are
    added to what is there. Give them in the order of their keys, in which they are locked."""
    if not rows:
        return
    given = _Given(session, model, rows)
    new = select(*given.columns.values()).select_from(given.source).where(true())
    table = cast(Table, model.__table__)
    statement = _dialect(session).insert(table).from_select(list(given.columns), new)
    added = {name: table.c[name] + statement.excluded[name] for name in sums}
    keys = list(table.primary_key)
    await session.execute(statement.on_conflict_do_update(index_elements=keys, set_=added))


async def update_rows(
    session: WriteSession, model: type[DeclarativeBase], rows: Sequence[Row]
) -> None:
    """Sets the columns in `rows`, all the same ones, of the row that has each one's primary key.
    Objects of the session are not told."""
    if not rows:
        return
    given = _Given(session, model, rows)
    key = _key(model)
    changed = {name: value for name, value in given.columns.items() if name != key.name}
    table = cast(Table, model.__table__)
    await session.execute(update(table).where(key == given.columns[key.name]).values(changed))


def among(
    session: ReadSession | WriteSession, column: Any, values: Sequence[str]
) -> ColumnElement[bool]:
    """`column IN (values)`, as one parameter: the statement stays the same."""
    if _is_sqlite(session):
        listed = func.json_each(_json(values)).table_valued("value")
        return cast(ColumnElement[bool], column.in_(select(listed.c.value)))
    array = bindparam(None, list(values), type_=postgresql.ARRAY(Text))
    return cast(ColumnElement[bool], column == func.any(array))


class _Given:
    """The rows as a table: `columns` of `source`, by name."""

    def __init__(
        self, session: WriteSession, model: type[DeclarativeBase], rows: Sequence[Row]
    ) -> None:
        kinds = {name: _kind(model, name) for name in rows[0]}
        self.source: FromClause
        self.columns: dict[str, ColumnElement[Any]]
        if _is_sqlite(session):
            self.source = func.json_each(_json(rows)).table_valued("value")
            value = self.source.c.value
            self.columns = {name: func.json_extract(value, f"$.{name}") for name in kinds}
        else:
            listed = func.json_to_recordset(as_type(_json(rows), JSON))
            typed = [column(name, kind) for name, kind in kinds.items()]
            self.source = listed.table_valued(*typed).render_derived("given", with_types=True)
            self.columns = {name: self.source.c[name] for name in kinds}


def _kind(model: type[DeclarativeBase], name: str) -> TypeEngine[Any]:
    kind: TypeEngine[Any] = model.__table__.columns[name].type
    return Text() if isinstance(kind, String) else kind  # VARCHAR(n) would cut silently


def _json(value: Sequence[Any]) -> Any:
    return bindparam(None, msgspec.json.encode(value).decode(), type_=Text)


def _key(model: type[DeclarativeBase]) -> Any:
    return inspect(model).primary_key[0]


def _dialect(session: ReadSession | WriteSession) -> Any:
    return sqlite if _is_sqlite(session) else postgresql


def _is_sqlite(session: ReadSession | WriteSession) -> bool:
    return session.get_bind().dialect.name == "sqlite"
