"""Commands that work on the server's host, straight on the database."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sqlalchemy.engine import make_url

from gateway.cli.configuration import load_settings
from gateway.cli.errors import CommandError
from gateway.kit.database import Database, WriteSession, sqlite_file
from gateway.settings import Settings

T = TypeVar("T")


def transact(work: Callable[[WriteSession], Awaitable[T]]) -> T:
    """Run `work` in one transaction on the database of the settings. Raises CommandError."""
    settings = load_settings()
    check_deployed(settings)
    return asyncio.run(_transact(settings, work))


def check_deployed(settings: Settings) -> None:
    """Raises CommandError where SQLite's file is not there: to open it would make an empty
    one. (Postgres says by itself that it has no such database.)"""
    file = sqlite_file(make_url(settings.effective_database_url))
    if file is not None and not file.exists():
        raise CommandError(
            f"there is no deployment here: {file} does not exist. `batten up` starts one, "
            "`batten migrate` makes its tables alone; another is named by BATTEN_DATA or "
            "DATABASE_URL (`batten config` shows which it is)"
        )


async def _transact(settings: Settings, work: Callable[[WriteSession], Awaitable[T]]) -> T:
    database = Database(settings.effective_database_url)
    try:
        async with database.write() as session:
            return await work(session)
    finally:
        await database.close()
