"""From an input file to rows: every line is checked, and only a good file runs.

    chunk of lines → parse, resolve, tokenise → one transaction: held rows, problems, progress

A crash loses at most one chunk; a second validator of the same batch loses the compare-and-set
on `validated_offset` and stops. At the end held rows become queued, or go when the batch fails.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import select

from gateway.adapters.repository import BaseModelRepository
from gateway.auth.scope import TenantScope, scope_for_background
from gateway.batches.lines import (
    LineRefused,
    ParsedLine,
    Problem,
    RawLine,
    duplicate,
    model_unknown,
    parse_line,
    refused_body,
)
from gateway.batches.reader import Chunk, read_chunks
from gateway.batches.repository import BatchRepository, LineRepository
from gateway.batches.rows import held_row, refused_row
from gateway.batches.state import check_transition
from gateway.batches.sweep import activity
from gateway.billing.service import price_for
from gateway.control.names import FINALIZE, VALIDATE
from gateway.errors import ApiError, NotFound
from gateway.files import service as files
from gateway.jobs.settlement import begin_finalizing, insert_new, is_finished
from gateway.jobs.submission import Plan, Target, plan_with, prompts_for, resolve_target
from gateway.kit import heartbeats
from gateway.kit.clock import now_ms
from gateway.kit.context import Context
from gateway.kit.database import WriteSession
from gateway.kit.prompts import Prompts
from gateway.kit.tasks import Tasks
from gateway.models import Batch, File, Request, Result

BUDGET_SECONDS = 30.0


@dataclass(slots=True)
class Checked:
    """A chunk's lines, in order: those that may run, and those that may not."""

    plans: list[tuple[RawLine, ParsedLine, Plan]] = field(default_factory=list)
    refused: list[tuple[RawLine, LineRefused]] = field(default_factory=list)


@dataclass(slots=True)
class Validation:
    context: Context
    batch: Batch
    scope: TenantScope
    seen: set[str]
    targets: dict[str, tuple[Target, Prompts] | ApiError] = field(default_factory=dict)

    async def check(self, lines: Sequence[RawLine]) -> Checked:
        parsed: list[tuple[RawLine, ParsedLine | LineRefused]] = []
        for line in lines:
            parsed.append((line, self._parse(line)))
        wanted = {each.model for _, each in parsed if isinstance(each, ParsedLine)}
        await self._resolve(sorted(wanted.difference(self.targets)))
        return await asyncio.to_thread(self._plan, parsed)

    def _parse(self, line: RawLine) -> ParsedLine | LineRefused:
        try:
            parsed = parse_line(line, self.batch.endpoint, self.context.settings)
        except LineRefused as refused:
            return self._named_once(refused)
        if parsed.custom_id in self.seen:
            return duplicate(line, parsed.custom_id)
        self.seen.add(parsed.custom_id)
        return parsed

    def _named_once(self, refused: LineRefused) -> LineRefused:
        """A bad line keeps its custom_id unless an earlier line has it."""
        if refused.custom_id is None or refused.custom_id in self.seen:
            return LineRefused(refused.problem)
        self.seen.add(refused.custom_id)
        return refused

    async def _resolve(self, models: Sequence[str]) -> None:
        for model in models:
            try:
                async with self.context.database.read() as session:
                    target = await resolve_target(session, self.scope, model)
                self.targets[model] = (target, await prompts_for(self.context, target))
            except (NotFound, ApiError) as error:
                if error.status >= 500:
                    raise
                self.targets[model] = error

    def _plan(self, parsed: Sequence[tuple[RawLine, ParsedLine | LineRefused]]) -> Checked:
        checked = Checked()
        for line, each in parsed:
            try:
                if isinstance(each, LineRefused):
                    raise each
                checked.plans.append((line, each, self._plan_one(line, each)))
            except LineRefused as refused:
                checked.refused.append((line, refused))
        return checked

    def _plan_one(self, line: RawLine, parsed: ParsedLine) -> Plan:
        found = self.targets[parsed.model]
        if isinstance(found, NotFound):
            raise model_unknown(line, parsed.custom_id, parsed.model)
        if isinstance(found, ApiError):
            raise refused_body(line, parsed.custom_id, found)
        target, prompts = found
        try:
            return plan_with(
                prompts, self.context.settings, target, self.batch.endpoint, parsed.body
            )
        except ApiError as error:
            raise refused_body(line, parsed.custom_id, error) from None


async def validate_batch(
    context: Context, tasks: Tasks, batch_id: str, budget: float = BUDGET_SECONDS
) -> None:
    """Continues where it was left. Idempotent; a long file takes several calls."""
    started = time.monotonic()
    opened = await _open(context, batch_id)
    if opened is None:
        return
    batch, file, seen = opened
    validation = Validation(context, batch, scope_for_background(batch.tenant_id), seen)
    pieces = files.stream(context, file, batch.validated_offset)
    longest = context.settings.line_bytes
    number = batch.validated_lines
    async for chunk in read_chunks(pieces, batch.validated_offset, number, longest):
        checked = await validation.check(chunk.lines)
        total = await _record(context, validation, chunk, checked)
        if total is None:
            return
        if total > context.settings.batch_lines:
            await _refuse(context, batch_id, _too_many(context.settings.batch_lines))
            return
        if time.monotonic() - started > budget:
            await tasks.send(VALIDATE, batch_id)
            return
    if await _conclude(context, batch_id):
        await tasks.send(FINALIZE, batch_id)


async def _open(context: Context, batch_id: str) -> tuple[Batch, File, set[str]] | None:
    async with context.database.read() as session:
        batch = await session.get(Batch, batch_id)
        if batch is None or batch.status != "validating":
            return None
        file = await session.get_one(File, batch.input_file_id)
        return batch, file, await LineRepository(session, batch_id).custom_ids()


async def _record(
    context: Context, validation: Validation, chunk: Chunk, checked: Checked
) -> int | None:
    """The chunk's transaction. Returns the lines so far, None when the batch is not ours."""
    expected = validation.batch.validated_offset
    async with context.database.write() as session:
        batch = await _locked(session, validation.batch.id)
        if batch.status != "validating" or batch.validated_offset != expected:
            return None
        await _insert_held(session, batch, checked)
        fallback = await _any_target(session) if batch.on_invalid == "skip" else None
        if fallback is not None:
            await _insert_refused(session, fallback, batch, checked)
            batch.failed += len(checked.refused)
        elif checked.refused:
            problems = [refused.problem.shown() for _, refused in checked.refused]
            batch.errors = [*(batch.errors or []), *problems]
        batch.validated_offset, batch.validated_lines = chunk.end, chunk.number
        batch.total += len(chunk.lines)
        await heartbeats.touch(session, activity(batch.id))
    validation.batch = batch
    return batch.total


async def _insert_held(session: WriteSession, batch: Batch, checked: Checked) -> None:
    rows = [held_row(batch, line, parsed.custom_id, plan) for line, parsed, plan in checked.plans]
    await insert_new(session, Request, rows, Request.id)
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
    await insert_new(session, Request, rows, Request.id)
    await insert_new(session, Result, results, Result.request_id)


async def _any_target(session: WriteSession) -> dict[str, Any] | None:
    """A refused line belongs to no model; its row names one, since every row must."""
    bases = await BaseModelRepository(session).all()
    if not bases:
        return None
    price = await price_for(session, [bases[0].name])
    return {"base_model": bases[0].name, "price_id": price.id}


async def _conclude(context: Context, batch_id: str) -> bool:
    """Lets a good file run. True when there is nothing to run: the batch is finalizing."""
    async with context.database.write() as session:
        batch = await _locked(session, batch_id)
        if batch.status != "validating":
            return False
        await heartbeats.clear(session, activity(batch_id))
        repository = BatchRepository(session, scope_for_background(batch.tenant_id))
        lines = LineRepository(session, batch_id)
        await repository.lock_tenant()
        models = await lines.models()
        batch.model = models[0] if len(models) == 1 else None
        problem = await _whole_file_problem(context, repository, batch)
        if batch.errors or problem:
            await _fail(lines, batch, problem)
            return False
        check_transition(batch.status, "in_progress")
        batch.status, batch.in_progress_at = "in_progress", now_ms()
        await lines.release()
        if is_finished(batch):
            begin_finalizing(batch, now_ms())
        return batch.status == "finalizing"


async def _whole_file_problem(
    context: Context, repository: BatchRepository, batch: Batch
) -> Problem | None:
    if batch.total == 0:
        return Problem("empty_file", "The input file has no requests.", "input_file_id")
    limit = context.settings.enqueued_tokens
    if await repository.enqueued_tokens(batch.model) + batch.enqueued_tokens <= limit:
        return None
    return Problem(
        "token_limit_exceeded",
        f"Enqueued token limit reached for {batch.model or 'several models'} in organization "
        f"{batch.tenant_id}. Limit: {limit:,} enqueued tokens. Please try again once some "
        "in_progress batches have been completed.",
    )


async def _refuse(context: Context, batch_id: str, problem: Problem) -> None:
    async with context.database.write() as session:
        batch = await _locked(session, batch_id)
        if batch.status == "validating":
            await heartbeats.clear(session, activity(batch_id))
            await _fail(LineRepository(session, batch_id), batch, problem)


async def _fail(lines: LineRepository, batch: Batch, problem: Problem | None) -> None:
    check_transition(batch.status, "failed")
    batch.status, batch.failed_at = "failed", now_ms()
    if problem is not None:
        batch.errors = [*(batch.errors or []), problem.shown()]
    batch.total = batch.failed = batch.enqueued_tokens = 0
    await lines.drop()


def _too_many(limit: int) -> Problem:
    return Problem(
        "too_many_tasks", f"The input file has more than {limit:,} requests.", "input_file_id"
    )


async def _locked(session: WriteSession, batch_id: str) -> Batch:
    rows = select(Batch).where(Batch.id == batch_id).with_for_update(key_share=True)
    return (await session.scalars(rows)).one()
