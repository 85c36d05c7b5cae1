"""What nobody needs any more in the store: files of deleted adapters, uploads of forms whose
process died before the commit, and of revisions whose outcome is settled."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from time import monotonic

from gateway.adapters.repository import ContentRepository, IngestRepository
from gateway.kit.clock import now_ms
from gateway.kit.context import Context
from gateway.kit.store import SWEEP_SECONDS, sweep_blob
from worker.protocol.peft import CONFIG_FILE, WEIGHTS_FILE

ORPHAN_AGE = timedelta(days=1)

GIVEN_UP = 20
"""So many of the store's time limits after it began, a sweep that has not ended died: it makes
`content_keys` requests between its two transactions."""

_AT_ONCE = 500


def content_keys(digest: str) -> list[str]:
    """In the store, for workers (`worker.adapters.store`)."""
    return [f"adapters/{digest}/{name}" for name in (CONFIG_FILE, WEIGHTS_FILE)]


async def purge_contents(context: Context, age: timedelta) -> int:
    """For a sweep: files stay so long after the last adapter that has them was deleted. So many at
    once, passing over those that cannot be removed, for SWEEP_SECONDS. Returns how many contents
    went."""
    before, after, gone, until = _ago(age), "", 0, monotonic() + SWEEP_SECONDS
    while True:
        async with context.database.read() as session:
            found = await ContentRepository(session).unused(before, after, _AT_ONCE)
        if not found:
            break
        gone += sum([await _purge(context, digest, before) for digest in found])
        after = found[-1]
        if gone >= _AT_ONCE or monotonic() >= until:
            break
    return gone


async def _purge(context: Context, digest: str, before: int) -> bool:
    begun = now_ms()
    given_up = _ago(timedelta(seconds=GIVEN_UP * context.settings.store_seconds))
    async with context.database.write() as session:
        if not await ContentRepository(session).begin_purge(
            digest, deleted_before=before, now=begun, given_up=given_up
        ):
            return False
    gone = all([await sweep_blob(context.store, key) for key in content_keys(digest)])
    async with context.database.write() as session:
        await ContentRepository(session).end_purge(digest, begun, gone)
    return gone


def _ago(age: timedelta) -> int:
    return now_ms() - int(age.total_seconds() * 1000)


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
                removed += await sweep_blob(context.store, key)
    return removed
