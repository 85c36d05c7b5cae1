"""Blobs: uploaded files, outputs, adapters. A local folder or S3-compatible, by URL (obstore)."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import obstore
import structlog
from obstore.exceptions import GenericError, PermissionDeniedError
from obstore.store import LocalStore, ObjectStore

from worker.protocol.object_store import reason

READ_CHUNK = 4 * 2**20
SWEEP_SECONDS = 60.0
"""A sweep takes no more blobs after so long: its task is killed after 300 seconds
(`gateway.control.broker`), and other sweeps follow in it."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Written:
    bytes: int
    sha256: str


class BlobTooLarge(Exception):
    """More bytes came than `limit`; nothing was stored."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"larger than {limit} bytes")
        self.limit = limit


async def write_blob(
    store: ObjectStore, key: str, chunks: AsyncIterator[bytes], limit: int | None = None
) -> Written:
    """Stream `chunks` to `key`: all of it appears, or nothing. Raises BlobTooLarge and what
    `chunks` raises."""
    size = 0
    digest = hashlib.sha256()

    async def counted() -> AsyncIterator[bytes]:
        nonlocal size
        async for chunk in chunks:
            size += len(chunk)
            if limit is not None and size > limit:
                raise BlobTooLarge(limit)
            digest.update(chunk)
            yield chunk

    await obstore.put_async(store, key, counted())
    return Written(size, digest.hexdigest())


async def read_blob(
    store: ObjectStore, key: str, start: int = 0, end: int | None = None
) -> AsyncIterator[bytes]:
    """Stream bytes [start, end). Raises FileNotFoundError.

    Each chunk is a request of its own: the store's time limit is one of requests, and who reads
    the chunks may take as long as they like.
    """
    if end is None:
        end = (await obstore.head_async(store, key))["size"]
    while start < end:
        stop = min(start + READ_CHUNK, end)
        yield bytes(await obstore.get_range_async(store, key, start=start, end=stop))
        start = stop


async def delete_blob(store: ObjectStore, key: str) -> None:
    """Deleting what is not there is no error."""
    try:
        await obstore.delete_async(store, key)
    except FileNotFoundError:
        return


async def sweep_blob(store: ObjectStore, key: str) -> bool:
    """False, and logged, when the store refuses it: a sweep's other blobs must not wait for one
    that is kept by a lock, a policy or a folder's permissions. Raises the store's other errors."""
    try:
        await delete_blob(store, key)
    except (PermissionDeniedError, GenericError) as error:
        is_refused = isinstance(error, PermissionDeniedError) or isinstance(store, LocalStore)
        if not is_refused:  # the store is away: so would it be for the others
            raise
        _log.error("blob_not_deleted", key=key, error=reason(error))
        return False
    return True
