"""What validation leaves in SQL: held rows, problems, how far it came, and its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import select

from gateway import heartbeats
from gateway.adapters.repository import BaseModelRepository
from gateway.auth.scope import scope_for_background
from gateway.batches.checking import Checked
from gateway.batches.ending import end_batch
from gateway.batches.lines import Problem
from gateway.batches.reader import Chunk
from gateway.batches.repository import BatchRepository, HeldLines, LineRepository
from gateway.batches.rows import held_row, refused_row
from gateway.batches.state import check_transition
from gateway.batches.sweep import activity
from gateway.billing.accounts import BudgetExceeded, reserve
from gateway.billing.service import price_for
from gateway.jobs.settlement import begin_finalizing, is_finished
from gateway.kit.clock import now_ms
from gateway.kit.context import Context
from gateway.kit.database import WriteSession
from gateway.kit.sql import insert_new
from gateway.models import Batch, Request, Result


async def record(context: Context, before: Batch, chunk: Chunk, checked: Checked) -> Batch | None:
    """One chunk. Returns the batch as it is now; None when it is no longer as it was `before`:
    cancelled, or validated by somebody else."""
    async with context.database.write() as session:
        batch = await _locked(session, before.id)
        if batch.status != "validating" or batch.validated_offset != before.validated_offset:
            return None
        await _insert_held(session, batch, checked)
        fallback = await _any_target(session) if batch.on_invalid == "skip" else None
        if fallback is not None:
            await _insert_refused(session, fallback, batch, checked)
            batch.failed += len(checked.refused)
        elif checked.refused:
            problems = [refused.problem.shown() for _, refused in checked.refused]
            batch.errors = _capped(batch.errors or [], problems, context.settings.batch_errors)
        batch.validated_offset, batch.validated_lines = chunk.end, chunk.number
        batch.total += len(chunk.lines)
        await heartbeats.touch(session, activity(batch.id))
    return batch


def _capped(errors: list[Any], new: list[Any], most: int) -> list[Any]:
    """The first problems: a file of bad lines must not become as much JSON, written again for
    every chunk. The last entry then says that there are more."""
    if len(errors) > most or not new:
        return errors
    kept = [*errors, *new]
    if len(kept) <= most:
        return kept
    more = Problem("too_many_errors", f"There are more errors: only {most:,} are listed.")
    return [*kept[:most], more.shown()]


async def _insert_held(session: WriteSession, batch: Batch, checked: Checked) -> None:
    rows = [held_row(batch, line, parsed.custom_id, plan) for line, parsed, plan in checked.plans]
    await insert_new(session, Request, rows)
    batch.enqueued_tokens += sum(row["prompt_tokens"] for row in rows)


async def _insert_refused(
    session: WriteSession, fallback: dict[str, Any], batch: Batch, checked: Checked
) -> None:
    """Bad lines of a batch that skips them: failed requests, so that each has its answer."""
    rows, results = [], []
    for line, refused in checked.refused:
        row = refused_row(batch, line, refused.custom_id, fallback)
        rows.append(row)
        results.append(
            {
                "request_id": row["id"],
                "status_code": 400,
                "body": refused.problem.body(),
                "error": None,
                "created_at": now_ms(),
            }
        )
    await insert_new(session, Request, rows)
    await insert_new(session, Result, results)


async def _any_target(session: WriteSession) -> dict[str, Any] | None:
    """A refused line belongs to no model; its row names one, since every row must."""
    bases = await BaseModelRepository(session).all()
    if not bases:
        return None
    price = await price_for(session, [bases[0].name])
    return {"base_model": bases[0].name, "price_id": price.id}


async def conclude(context: Context, batch_id: str) -> bool:
    """Lets a good file run. True when there is nothing to run: the batch is finalizing."""
    async with context.database.write() as session:
        batch = await _locked(session, batch_id)
        if batch.status != "validating":
            return False
        await heartbeats.clear(session, activity(batch_id))
        repository = BatchRepository(session, scope_for_background(batch.tenant_id))
        lines = LineRepository(session, batch_id)
        limits = await repository.lock_tenant()
        limit = limits.enqueued_tokens or context.settings.enqueued_tokens
        held = await lines.held()
        batch.model = held[0].model if len(held) == 1 else None
        problem = await _whole_file_problem(repository, batch, held, limit)
        if batch.errors or problem:
            await _fail(session, batch, problem)
            return False
        await lines.release()
        try:
            await reserve(session, batch.tenant_id, sum(of.reserved_nano for of in held))
        except BudgetExceeded as error:
            await _fail(session, batch, Problem("budget_exceeded", error.message))
            return False
        if len(held) > 1:
            await lines.begin_models(held)
        check_transition(batch.status, "in_progress")
        batch.status, batch.in_progress_at = "in_progress", now_ms()
        if is_finished(batch):
            begin_finalizing(batch, now_ms())
        return batch.status == "finalizing"


async def _whole_file_problem(
    repository: BatchRepository, batch: Batch, held: Sequence[HeldLines], limit: int
) -> Problem | None:
    if batch.total == 0:
        return Problem("empty_file", "The input file has no requests.", "input_file_id")
    enqueued = await repository.enqueued_tokens()
    for of in held:
        if enqueued.get(of.model, 0) + of.prompt_tokens > limit:
            return Problem(
                "token_limit_exceeded",
                f"Enqueued token limit reached for {of.model} in organization "
                f"{batch.tenant_id}. Limit: {limit:,} enqueued tokens. Please try again once some "
                "in_progress batches have been completed.",
            )
    return None


async def refuse(context: Context, batch_id: str, problem: Problem) -> None:
    async with context.database.write() as session:
        batch = await _locked(session, batch_id)
        if batch.status == "validating":
            await heartbeats.clear(session, activity(batch_id))
            await _fail(session, batch, problem)


async def _fail(session: WriteSession, batch: Batch, problem: Problem | None) -> None:
    await end_batch(session, batch, "failed", now_ms())
    if problem is not None:
        batch.errors = [*(batch.errors or []), problem.shown()]
    batch.total = batch.failed = batch.enqueued_tokens = 0
    await LineRepository(session, batch.id).drop()


async def _locked(session: WriteSession, batch_id: str) -> Batch:
    rows = select(Batch).where(Batch.id == batch_id).with_for_update(key_share=True)
    return (await session.scalars(rows)).one()
