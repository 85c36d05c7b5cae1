"""Usage as it would be had its rows been booked as they are now."""

from __future__ import annotations

from sqlalchemy import delete, select

from gateway.billing.booking import SUMS, hours_of
from gateway.kit.database import WriteSession
from gateway.kit.sql import add_rows
from gateway.models import UsageHour, UsageRecord


async def book_again(session: WriteSession) -> None:
    """After a test has changed usage rows: sums of hours that fit them."""
    await session.execute(delete(UsageHour))
    rows = (await session.execute(select(UsageRecord.__table__))).mappings().all()
    await add_rows(session, UsageHour, hours_of(rows), SUMS)
