"""Signs of life in SQL: when a named activity last did something."""

from __future__ import annotations

from sqlalchemy import delete, select, update

from gateway.kit.clock import now_ms
from gateway.kit.database import ReadSession, WriteSession
from gateway.kit.sql import insert_ignoring
from gateway.models import Heartbeat


async def touch(session: WriteSession, name: str, at: int | None = None) -> None:
    """`at` is now, unless it is given."""
    at = now_ms() if at is None else at
    await session.execute(insert_ignoring(session, Heartbeat).values(name=name, at=at))
    await session.execute(update(Heartbeat).where(Heartbeat.name == name).values(at=at))


async def clear(session: WriteSession, name: str) -> None:
    await session.execute(delete(Heartbeat).where(Heartbeat.name == name))


async def last(session: ReadSession | WriteSession, name: str) -> int | None:
    """Milliseconds since the epoch; None when it never was, or has been cleared."""
    return await session.scalar(select(Heartbeat.at).where(Heartbeat.name == name))
