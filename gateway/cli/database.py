"""Commands that work on the server's host, straight on the database."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from gateway.cli.configuration import load_settings
from gateway.kit.database import Database, WriteSession
from gateway.settings import Settings

T = TypeVar("T")


def transact(work: Callable[[WriteSession], Awaitable[T]]) -> T:
    """Run `work` in one transaction on the database of the settings."""
    return asyncio.run(_transact(load_settings(), work))


async def _transact(settings: Settings, work: Callable[[WriteSession], Awaitable[T]]) -> T:
    database = Database(settings.effective_database_url)
    try:
        async with database.write() as session:
            return await work(session)
    finally:
        await database.close()
