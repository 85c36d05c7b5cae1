"""Blobs that nobody can see any more: of deleted and expired files, and of crashed uploads."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from time import monotonic

import obstore
from sqlalchemy import and_, exists, or_, select, update

from gateway.kit.clock import now_ms
from gateway.kit.context import Context
from gateway.kit.store import SWEEP_SECONDS, sweep_blob
from gateway.models import Batch, File

ORPHAN_AGE = timedelta(days=1)
_AT_ONCE = 500
_OPEN = ("validating", "in_progress", "finalizing", "cancelling")


async def purge_files(context: Context) -> int:
    """Removes blobs of files that are gone for their owner and that no open batch reads: so many
    at once, passing over those that cannot be removed, for SWEEP_SECONDS."""
    now, after, until = now_ms(), "", monotonic() + SWEEP_SECONDS
    gone: list[str] = []
    while found := await _unneeded(context, now, after):
        gone += [file_id for file_id, key in found if await sweep_blob(context.store, key)]
        after = found[-1][0]
        if len(gone) >= _AT_ONCE or monotonic() >= until:
            break
    async with context.database.write() as session:
        await session.execute(update(File).where(File.id.in_(gone)).values(purged_at=now))
    return len(gone)


async def _unneeded(context: Context, now: int, after: str) -> list[tuple[str, str]]:
    """(id, key), by id."""
    being_read = exists().where(Batch.input_file_id == File.id, Batch.status.in_(_OPEN))
    async with context.database.read() as session:
        rows = await session.execute(
            select(File.id, File.store_key)
            .where(
                File.id > after,
                File.purged_at.is_(None),
                or_(
                    File.deleted_at.is_not(None),
                    and_(File.expires_at.is_not(None), File.expires_at <= now),
                ),
                ~being_read,
            )
            .order_by(File.id)
            .limit(_AT_ONCE)
        )
        return [(row[0], row[1]) for row in rows]


async def remove_orphans(context: Context, age: timedelta = ORPHAN_AGE) -> int:
    """Removes blobs without a row, once no upload can still be about to add one."""
    before = datetime.now(UTC) - age
    removed = 0
    async for page in obstore.list(context.store, prefix="files/", chunk_size=_AT_ONCE):
        keys = [meta["path"] for meta in page if meta["last_modified"] < before]
        async with context.database.read() as session:
            known = set(
                await session.scalars(select(File.store_key).where(File.store_key.in_(keys)))
            )
        for key in keys:
            if key not in known:
                removed += await sweep_blob(context.store, key)
    return removed
