"""Files: blobs with a name, an owner and an end.

A blob is written before its row: a crash in between leaves a blob that nobody can see (a sweep
removes it), never a row without a blob.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from gateway.auth.scope import TenantScope
from gateway.errors import NotFound
from gateway.files.repository import FileRepository
from gateway.kit.clock import now_ms
from gateway.kit.context import Context
from gateway.kit.database import ReadSession, WriteSession
from gateway.kit.ids import new_id
from gateway.kit.store import Written, read_blob, write_blob
from gateway.models import File


@dataclass(frozen=True, slots=True)
class StoredBlob:
    """Written, but no row yet."""

    file_id: str
    store_key: str
    written: Written


async def store_blob(
    context: Context, chunks: AsyncIterator[bytes], limit: int | None = None
) -> StoredBlob:
    """Raises BlobTooLarge, and what `chunks` raises; then nothing is stored."""
    file_id = new_id("file")
    key = f"files/{file_id}"
    return StoredBlob(file_id, key, await write_blob(context.store, key, chunks, limit))


def file_row(
    scope: TenantScope, blob: StoredBlob, filename: str, purpose: str, expires_at: int | None = None
) -> File:
    """A row to add in the transaction that makes the blob known."""
    return File(
        id=blob.file_id,
        tenant_id=scope.tenant_id,
        filename=filename,
        purpose=purpose,
        bytes=blob.written.bytes,
        store_key=blob.store_key,
        created_at=now_ms(),
        expires_at=expires_at,
    )


async def create_output(
    context: Context,
    scope: TenantScope,
    filename: str,
    purpose: str,
    chunks: AsyncIterator[bytes],
    expires_at: int | None = None,
) -> File:
    """Write the blob and return its row, not yet in any session: `session.add(file)` within
    the transaction that refers to it."""
    return file_row(scope, await store_blob(context, chunks), filename, purpose, expires_at)


async def get_file(session: ReadSession | WriteSession, scope: TenantScope, file_id: str) -> File:
    """Raises NotFound: unknown, deleted, expired or another tenant's."""
    file = await FileRepository(session, scope).get(file_id)
    if file is None:
        raise no_such_file(file_id)
    return file


async def delete_file(session: WriteSession, scope: TenantScope, file_id: str) -> None:
    """Hidden at once; a running batch still reads it. Raises NotFound."""
    await get_file(session, scope, file_id)
    if not await FileRepository(session, scope).hide(file_id):
        raise no_such_file(file_id)


def stream(
    context: Context, file: File, start: int = 0, end: int | None = None
) -> AsyncIterator[bytes]:
    """Bytes [start, end) in chunks of about 1 MiB."""
    return read_blob(context.store, file.store_key, start, file.bytes if end is None else end)


def no_such_file(file_id: str) -> NotFound:
    return NotFound(f"No such File object: {file_id}", param="id")
