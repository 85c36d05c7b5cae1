"""What a transaction leaves behind when it is broken off."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from sqlalchemy import text

from gateway.kit.database import Database


async def test_a_connection_closed_in_mid_statement_lets_go_of_the_write_lock(
    tmp_path: Path,
) -> None:
    database = Database(f"sqlite:///{tmp_path / 'x.db'}")
    async with database.write() as session:
        await session.execute(text("CREATE TABLE numbers (number INTEGER)"))
        await session.execute(text("INSERT INTO numbers VALUES (1), (2), (3)"))
    broken = await database.engine.raw_connection()
    driver: Any = broken.driver_connection
    await driver.execute("BEGIN IMMEDIATE")
    unread = await driver.execute("UPDATE numbers SET number = number + 1 RETURNING number")
    await driver.close()
    broken.invalidate()
    async with asyncio.timeout(5), database.write() as session:
        numbers = await session.scalars(text("SELECT number FROM numbers ORDER BY number"))
        assert list(numbers) == [1, 2, 3]
    del unread
    await database.close()
