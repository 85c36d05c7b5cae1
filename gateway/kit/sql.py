"""Statements that both databases know, but SQLAlchemy spells once per dialect."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Insert
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import DeclarativeBase

from gateway.kit.database import ReadSession, WriteSession


def insert_ignoring(session: ReadSession | WriteSession, model: type[DeclarativeBase]) -> Insert:
    """INSERT … ON CONFLICT DO NOTHING; add `.values()` and `.returning()`, whose rows are
    those really inserted. On Postgres a concurrent insert of the same key is waited for."""
    dialect: Any = sqlite if session.get_bind().dialect.name == "sqlite" else postgresql
    statement: Insert = dialect.insert(model).on_conflict_do_nothing()
    return statement
