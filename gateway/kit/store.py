"""Blobs: uploaded files, outputs, adapters. A local folder or S3-compatible, by URL (obstore)."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlparse

import obstore
from obstore.store import LocalStore, ObjectStore, from_url

if TYPE_CHECKING:
    from obstore import GetOptions

READ_CHUNK = 2**20


@dataclass(frozen=True, slots=True)
class Written:
    bytes: int
    sha256: str


class BlobTooLarge(Exception):
    """More bytes came than `limit`; nothing was stored."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"larger than {limit} bytes")
        self.limit = limit


def open_store(url: str) -> ObjectStore:
    """`file:///dir` (made when missing) or any URL that obstore knows, such as `s3://bucket`."""
    if url.startswith("file://"):
        path = Path(urlparse(url).path)
        path.mkdir(parents=True, exist_ok=True)
        return LocalStore(path)
    return from_url(url)


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
    """Stream bytes [start, end). Raises FileNotFoundError."""
    if end is not None and end <= start:
        return
    options: GetOptions = {}
    if end is not None:
        options = {"range": (start, end)}
    elif start > 0:
        options = {"range": {"offset": start}}
    result = await obstore.get_async(store, key, options=options)
    async for chunk in result.stream(min_chunk_size=READ_CHUNK):
        yield bytes(chunk)


async def delete_blob(store: ObjectStore, key: str) -> None:
    """Deleting what is not there is no error."""
    try:
        await obstore.delete_async(store, key)
    except FileNotFoundError:
        return
