"""Uploads that nobody will check any more: of forms whose process died before the commit, and
of revisions whose outcome is settled."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from gateway.adapters.repository import IngestRepository
from gateway.kit.context import Context
from gateway.kit.store import delete_blob

ORPHAN_AGE = timedelta(days=1)


async def remove_orphan_uploads(context: Context, age: timedelta = ORPHAN_AGE) -> int:
    """For a sweep. Returns the blobs removed."""
    before = datetime.now(UTC) - age
    removed = 0
    async for page in context.store.list("uploads/"):
        old = [item["path"] for item in page if item["last_modified"] <= before]
        ids = {key.split("/")[1] for key in old}
        async with context.database.read() as session:
            waiting = await IngestRepository(session).waiting_among(ids)
        for key in old:
            if key.split("/")[1] not in waiting:
                await delete_blob(context.store, key)
                removed += 1
    return removed
