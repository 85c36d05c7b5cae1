"""Ends a batch: freeze what is left, write its files, name them. Safe to repeat at any point.

    lock → freeze (one transaction) → write blobs → compare-and-set status, file ids

A crash between the last two leaves a blob without a row, which a sweep removes; the next run
writes another. Of two runs at once the second loses the compare-and-set and removes its blobs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import msgspec
from sqlalchemy import select

from gateway import heartbeats
from gateway.auth.scope import scope_for_background
from gateway.batches.ending import end_batch
from gateway.batches.freeze import Stopped, freeze
from gateway.batches.repository import FinishedLine, LineRepository, finished_lines
from gateway.batches.state import final_status
from gateway.batches.sweep import activity
from gateway.files import service as files
from gateway.jobs.service import stop_in_queue
from gateway.jobs.settlement import begin_finalizing, is_finished
from gateway.kit.clock import now_ms
from gateway.kit.context import Context
from gateway.kit.database import WriteSession
from gateway.kit.store import delete_blob
from gateway.models import Batch, File

CANCEL_GRACE_MS = 30_000
SUCCEEDED = ("completed",)
UNSUCCESSFUL = ("failed", "cancelled", "expired")
_BUFFER = 256 * 1024
_LINE_ENDS = {char.encode(): f"\\u{ord(char):04x}".encode() for char in "\x85\u2028\u2029"}
"""Text in JSON, but the end of a line for Python's `splitlines`, with which clients read files."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """`batch` is set when its files can be written."""

    batch: Batch | None = None
    stopped: Stopped = field(default_factory=Stopped)


async def finalize_batch(context: Context, batch_id: str, grace_ms: int = CANCEL_GRACE_MS) -> bool:
    """True when the batch is terminal. A batch that has lines running is left alone, unless its
    window or its grace is over."""
    async with context.database.write() as session:
        batch = await _locked(session, batch_id)
        prepared = await _prepare(session, batch, grace_ms)
        if prepared.batch is None:
            await heartbeats.clear(session, activity(batch_id))
        else:
            await heartbeats.touch(session, activity(batch_id))
    for model, ids in prepared.stopped.ids.items():
        await stop_in_queue(context, model, ids)
    if prepared.batch is None:
        return batch.status in {"completed", "expired", "cancelled", "failed"}
    await _write_files(context, prepared.batch)
    return True


def result_line(line: FinishedLine) -> bytes:
    """One line of an output or error file, with its line end, and no other that readers know."""
    response = None
    if line.status_code is not None:
        response = {
            "status_code": line.status_code,
            "request_id": line.id,
            "body": _raw(line.body),
        }
    encoded = msgspec.json.encode(
        {
            "id": line.id,
            "custom_id": line.custom_id,
            "response": response,
            "error": _raw(line.error),
        }
    )
    for raw, escaped in _LINE_ENDS.items():
        encoded = encoded.replace(raw, escaped)
    return encoded + b"\n"


def _raw(json: str | None) -> msgspec.Raw | None:
    return None if json is None else msgspec.Raw(json.encode())


async def result_lines(
    context: Context, batch_id: str, states: Sequence[str]
) -> AsyncIterator[bytes]:
    """Lines in `states`, in input order, in pieces of some size."""
    piece = bytearray()
    async for line in finished_lines(context.database, batch_id, states):
        piece += result_line(line)
        if len(piece) >= _BUFFER:
            yield bytes(piece)
            piece.clear()
    if piece:
        yield bytes(piece)


async def _prepare(session: WriteSession, batch: Batch, grace_ms: int) -> Prepared:
    now = now_ms()
    match batch.status:
        case "in_progress" if is_finished(batch):
            begin_finalizing(batch, now)
            return Prepared(batch)
        case "in_progress" if batch.expires_at <= now:
            stopped = await freeze(session, batch, "expired")
            begin_finalizing(batch, now)
            return Prepared(batch, stopped)
        case "cancelling" if batch.in_progress_at is None:
            await LineRepository(session, batch.id).drop()
            batch.total = batch.failed = batch.enqueued_tokens = 0
            await end_batch(session, batch, final_status(batch.status, batch.expired), now)
            return Prepared()
        case "cancelling":
            await freeze(session, batch, "cancelled", ("held", "queued"))
            overdue = now >= (batch.cancelling_at or 0) + grace_ms
            if await LineRepository(session, batch.id).out() and not overdue:
                return Prepared()
            return Prepared(batch, await freeze(session, batch, "cancelled"))
        case "finalizing":
            return Prepared(batch)
        case _:
            return Prepared()


async def _write_files(context: Context, batch: Batch) -> None:
    output = await _write(context, batch, "output", SUCCEEDED, batch.completed)
    unsuccessful = batch.failed + batch.cancelled + batch.expired
    errors = await _write(context, batch, "error", UNSUCCESSFUL, unsuccessful)
    async with context.database.write() as session:
        current = await _locked(session, batch.id)
        won = current.status == batch.status
        if won:
            session.add_all([file for file in (output, errors) if file is not None])
            await session.flush()
            current.output_file_id = output.id if output else None
            current.error_file_id = errors.id if errors else None
            status = final_status(current.status, current.expired)
            await end_batch(session, current, status, now_ms())
            await heartbeats.clear(session, activity(batch.id))
    for file in (output, errors):
        if file is not None and not won:
            await delete_blob(context.store, file.store_key)


async def _write(
    context: Context, batch: Batch, name: str, states: Sequence[str], count: int
) -> File | None:
    if not count:
        return None
    seconds = batch.output_expires_seconds
    return await files.create_output(
        context,
        scope_for_background(batch.tenant_id),
        f"{batch.id}_{name}.jsonl",
        "batch_output",
        result_lines(context, batch.id, states),
        None if seconds is None else now_ms() + seconds * 1000,
    )


async def _locked(session: WriteSession, batch_id: str) -> Batch:
    rows = select(Batch).where(Batch.id == batch_id).with_for_update(key_share=True)
    return (await session.scalars(rows)).one()
