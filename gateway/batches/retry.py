"""Lines that did not succeed, as the input file of another batch."""

from __future__ import annotations

from collections.abc import AsyncIterator

import obstore

from gateway.auth.scope import TenantScope
from gateway.batches import service
from gateway.batches.finaliser import UNSUCCESSFUL
from gateway.batches.repository import finished_lines
from gateway.batches.schemas import CreateBatch, RetryBatch
from gateway.batches.state import TERMINAL
from gateway.errors import Conflict, NotFound
from gateway.files import service as files
from gateway.kit.context import Context
from gateway.models import Batch, File

_LINES_AT_ONCE = 500
_BYTES_AT_ONCE = 4 * 2**20


async def retried(
    context: Context, scope: TenantScope, batch_id: str, wanted: RetryBatch
) -> tuple[CreateBatch, File]:
    """The batch to create and its input file, whose row is not added yet. Lines keep their
    custom_id; a line that has none cannot be told from others and is left out.

    Raises NotFound, Conflict: the batch still runs, nothing failed, or its file is gone."""
    async with context.database.read() as session:
        batch = await service.get_batch(session, scope, batch_id)
        _check(batch)
        source = await _source(session, scope, batch)
    pieces = _lines(context, batch, source)
    file = await files.create_output(context, scope, f"{batch.id}_retry.jsonl", "batch", pieces)
    create = CreateBatch(
        endpoint=batch.endpoint,
        completion_window=wanted.completion_window or batch.completion_window,
        input_file_id=file.id,
        metadata=batch.user_metadata if wanted.metadata is None else wanted.metadata,
        on_invalid=batch.on_invalid,  # type: ignore[arg-type]
    )
    return create, file


def _check(batch: Batch) -> None:
    if batch.status not in TERMINAL:
        raise Conflict(f"Cannot retry a batch with status '{batch.status}'.")
    if not batch.failed + batch.cancelled + batch.expired:
        raise Conflict("This batch has no failed requests to retry.", code="nothing_to_retry")


async def _source(session: service.Session, scope: TenantScope, batch: Batch) -> File:
    try:
        return await files.get_file(session, scope, batch.input_file_id)
    except NotFound:
        raise Conflict(
            "The batch's input file was deleted or has expired.", code="input_file_deleted"
        ) from None


async def _lines(context: Context, batch: Batch, source: File) -> AsyncIterator[bytes]:
    starts: list[int] = []
    lengths: list[int] = []
    async for request in finished_lines(context.database, batch.id, UNSUCCESSFUL):
        if request.custom_id is None:
            continue
        starts.append(request.input_offset or 0)
        lengths.append(request.input_length or 0)
        if len(starts) == _LINES_AT_ONCE or sum(lengths) >= _BYTES_AT_ONCE:
            yield await _read(context, source, starts, lengths)
            starts, lengths = [], []
    if starts:
        yield await _read(context, source, starts, lengths)


async def _read(context: Context, source: File, starts: list[int], lengths: list[int]) -> bytes:
    found = await obstore.get_ranges_async(
        context.store, source.store_key, starts=starts, lengths=lengths
    )
    return b"".join(bytes(line).rstrip(b"\r\n") + b"\n" for line in found)
