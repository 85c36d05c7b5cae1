"""From an input file to rows: every line is checked, and only a good file runs.

    chunk of lines → parse, resolve, tokenise → one transaction: held rows, problems, progress

A crash loses at most one chunk; a second validator of the same batch loses the compare-and-set
on `validated_offset` and stops. At the end held rows become queued, or go when the batch fails.
"""

from __future__ import annotations

import time

from gateway.auth.scope import scope_for_background
from gateway.batches.checking import Checker
from gateway.batches.lines import Problem
from gateway.batches.progress import conclude, record, refuse
from gateway.batches.reader import read_chunks
from gateway.batches.repository import LineRepository
from gateway.files import service as files
from gateway.kit.context import Context
from gateway.kit.task_names import FINALIZE, VALIDATE
from gateway.kit.tasks import Tasks
from gateway.models import Batch, File

BUDGET_SECONDS = 30.0


async def validate_batch(
    context: Context, tasks: Tasks, batch_id: str, budget: float = BUDGET_SECONDS
) -> None:
    """Continues where it was left. Idempotent; a long file takes several calls."""
    started = time.monotonic()
    opened = await _open(context, batch_id)
    if opened is None:
        return
    batch, file, seen = opened
    checker = Checker(context, batch, scope_for_background(batch.tenant_id), seen)
    pieces = files.stream(context, file, batch.validated_offset)
    start, number = batch.validated_offset, batch.validated_lines
    async for chunk in read_chunks(pieces, start, number, context.settings.line_bytes):
        recorded = await record(context, batch, chunk, await checker.check(chunk.lines))
        if recorded is None:
            return
        batch = recorded
        if batch.total > context.settings.batch_lines:
            await refuse(context, batch_id, _too_many(context.settings.batch_lines))
            return
        if time.monotonic() - started > budget:
            await tasks.send(VALIDATE, batch_id)
            return
    if await conclude(context, batch_id):
        await tasks.send(FINALIZE, batch_id)


async def _open(context: Context, batch_id: str) -> tuple[Batch, File, set[str]] | None:
    async with context.database.read() as session:
        batch = await session.get(Batch, batch_id)
        if batch is None or batch.status != "validating":
            return None
        file = await session.get_one(File, batch.input_file_id)
        return batch, file, await LineRepository(session, batch_id).custom_ids()


def _too_many(limit: int) -> Problem:
    return Problem(
        "too_many_tasks", f"The input file has more than {limit:,} requests.", "input_file_id"
    )
