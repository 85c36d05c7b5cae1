"""Meters adapters by the hour: what a tenant kept for the whole of it, once.

What was stored in a past hour follows from when revisions became ready and adapters were deleted,
so hours that were missed are metered later to the same amounts. One row per tenant and hour: a
second run changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway import heartbeats
from gateway.billing.accounts import Change, apply
from gateway.billing.storage_repository import StorageRepository
from gateway.kit.clock import now_ms
from gateway.kit.context import Context
from gateway.kit.database import WriteSession
from gateway.kit.ids import new_id
from gateway.kit.sql import insert_new
from gateway.models import StoragePrice, StorageRecord

HOUR_MS = 3_600_000
METER = "billing.storage"
_HOURS_AT_ONCE = 200
_TENANTS_AT_ONCE = 500
_GIB = 2**30


def storage_nano(price: StoragePrice, byte_hours: int) -> int:
    """Half a nanodollar is rounded up."""
    return (byte_hours * price.gib_hour_nano + _GIB // 2) // _GIB


async def metered_until(context: Context) -> int:
    """The first millisecond that is not metered; 0 before the meter's first run."""
    async with context.database.read() as session:
        return await heartbeats.last(session, METER) or 0


async def meter_storage(context: Context) -> int:
    """Meters the hours that have ended since the last run, the oldest first, some at once.
    Returns how many. The first run ever only starts the meter."""
    until = await metered_until(context)
    now = now_ms()
    this_hour = now - now % HOUR_MS
    hours = list(range(until, this_hour, HOUR_MS))[:_HOURS_AT_ONCE] if until else []
    for hour in hours:
        await meter_hour(context, hour)
    if not until:
        async with context.database.write() as session:
            await heartbeats.touch(session, METER, this_hour)
    return len(hours)


async def meter_hour(context: Context, hour: int) -> None:
    """`hour` is its first millisecond."""
    async with context.database.read() as session:
        stored = await StorageRepository(session).stored(hour, hour + HOUR_MS)
    for start in range(0, len(stored), _TENANTS_AT_ONCE):
        async with context.database.write() as session:
            await _record(session, stored[start : start + _TENANTS_AT_ONCE], hour)
    async with context.database.write() as session:
        await heartbeats.touch(session, METER, hour + HOUR_MS)


async def _record(session: WriteSession, stored: Sequence[tuple[str, int]], hour: int) -> None:
    price = await StorageRepository(session).price_at(hour)
    rows: dict[str, dict[str, Any]] = {
        new_id("storage"): {
            "tenant_id": tenant_id,
            "bytes": size,
            "price_id": price.id,
            "amount_nano": storage_nano(price, size),
            "created_at": hour,
        }
        for tenant_id, size in stored
    }
    inserted = await insert_new(
        session, StorageRecord, [{"id": row_id, **row} for row_id, row in rows.items()]
    )
    new = [rows[row_id] for row_id in inserted]
    changes = {row["tenant_id"]: Change(spent=row["amount_nano"]) for row in new}
    await apply(session, changes, hour)


async def set_storage_price(session: WriteSession, gib_hour_nano: int) -> StoragePrice:
    """A new version, for the hours that begin from now on."""
    price = StoragePrice(
        id=new_id("storage_price"), gib_hour_nano=gib_hour_nano, created_at=now_ms()
    )
    session.add(price)
    await session.flush()
    return price
