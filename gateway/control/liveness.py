"""Whether control tasks are consumed, which answering a ping does not say: the heartbeat's age."""

from __future__ import annotations

from gateway import heartbeats
from gateway.control.app import CONTROL
from gateway.kit.clock import now_ms
from gateway.kit.database import Database
from gateway.settings import Settings

MOST_SECONDS = 60.0


async def silent_seconds(settings: Settings) -> float | None:
    """Since a control process last consumed the beat's task; None when none ever did."""
    database = Database(settings.effective_database_url)
    try:
        async with database.read() as session:
            at = await heartbeats.last(session, CONTROL)
    finally:
        await database.close()
    return None if at is None else (now_ms() - at) / 1000
