"""What a batch would take and cost, before it is created. Nothing is stored."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from gateway.auth.principal import Principal
from gateway.batches import service
from gateway.batches.checking import Checked, Checker
from gateway.batches.lines import Problem
from gateway.batches.reader import read_chunks
from gateway.batches.schemas import BatchErrorObject, BatchEstimate, CreateBatch
from gateway.batches.throughput import ThroughputRepository
from gateway.billing.service import amount_nano, dollars
from gateway.files import service as files
from gateway.jobs.submission import Plan
from gateway.kit.clock import now_ms
from gateway.kit.context import Context
from gateway.models import Batch

BUDGET_SECONDS = 10.0
SHOWN_ERRORS = 20


@dataclass(slots=True)
class _Sums:
    lines: int = 0
    bytes: int = 0
    prompt: int = 0
    most: int = 0
    expected: float = 0.0
    amount_most: int = 0
    amount_expected: int = 0
    models: set[str] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)
    invalid: int = 0


async def estimate(context: Context, principal: Principal, wanted: CreateBatch) -> BatchEstimate:
    """A long file is read for a few seconds and the rest is taken to be like it. Raises
    BadRequest (unknown file)."""
    pieces, size = await _pieces(context, principal, wanted)
    checker = Checker(context, Batch(endpoint=wanted.endpoint), principal.scope, set())
    speeds = _Speeds(context, principal)
    sums = _Sums()
    until = time.monotonic() + BUDGET_SECONDS
    async for chunk in read_chunks(pieces, 0, 0, context.settings.line_bytes):
        await _add(sums, speeds, await checker.check(chunk.lines))
        sums.bytes = chunk.end
        if time.monotonic() > until:
            break
    complete = size is None or sums.bytes >= size or time.monotonic() <= until
    scale = 1.0 if complete or size is None else size / max(sums.bytes, 1)
    return await _shown(sums, speeds, scale, complete)


class _Speeds:
    """Answer lengths and throughput, from what has run: looked up once a model."""

    def __init__(self, context: Context, principal: Principal) -> None:
        self._context = context
        self._principal = principal
        self._shares: dict[str, float] = {}

    async def expected_tokens(self, plan: Plan) -> float:
        """Of all choices, from the tenant's recent answers; without any, `max_tokens`."""
        model = plan.target.name
        if model not in self._shares:
            async with self._context.database.read() as session:
                repository = ThroughputRepository(session, self._principal.scope)
                self._shares[model] = await repository.share_of_max_tokens(model)
        return plan.max_tokens * plan.generation.sampling.n * self._shares[model]

    async def finish_at(self, models: set[str], tokens: float) -> int | None:
        """Unix seconds; None when nothing has run lately that would tell."""
        latest = 0.0
        async with self._context.database.read() as session:
            repository = ThroughputRepository(session, self._principal.scope)
            for model in models:
                speed = await repository.tokens_per_second(model)
                if not speed:
                    return None
                latest = max(latest, (await repository.backlog(model) + tokens) / speed)
        return int(now_ms() / 1000 + latest) if models else None


async def _add(sums: _Sums, speeds: _Speeds, checked: Checked) -> None:
    for _, _, plan in checked.plans:
        prompt = len(plan.generation.prompt_ids)
        most = plan.max_tokens * plan.generation.sampling.n
        expected = await speeds.expected_tokens(plan)
        price = plan.target.price
        sums.prompt += prompt
        sums.most += most
        sums.expected += expected
        sums.amount_most += amount_nano(price, "batch", prompt, 0, most)
        sums.amount_expected += amount_nano(price, "batch", prompt, 0, round(expected))
        sums.models.add(plan.target.resolved.base.name)
    sums.lines += len(checked.plans)
    sums.invalid += len(checked.refused)
    sums.problems += [refused.problem for _, refused in checked.refused]
    del sums.problems[SHOWN_ERRORS:]


async def _pieces(
    context: Context, principal: Principal, wanted: CreateBatch
) -> tuple[AsyncIterator[bytes], int | None]:
    """The lines, and how many bytes they are where that is known."""
    if wanted.requests is not None:
        return service.inline_lines(wanted.requests, wanted.endpoint), None
    async with context.database.read() as session:
        file = await service.input_file(session, principal.scope, wanted.input_file_id or "")
    return files.stream(context, file), file.bytes


async def _shown(sums: _Sums, speeds: _Speeds, scale: float, complete: bool) -> BatchEstimate:
    tokens = (sums.prompt + sums.expected) * scale
    most, expected = round(sums.amount_most * scale), round(sums.amount_expected * scale)
    return BatchEstimate(
        complete=complete,
        requests=round(sums.lines * scale),
        invalid_requests=round(sums.invalid * scale),
        errors=[BatchErrorObject.model_validate(each.shown()) for each in sums.problems],
        prompt_tokens=round(sums.prompt * scale),
        max_completion_tokens=round(sums.most * scale),
        expected_completion_tokens=round(sums.expected * scale),
        max_amount=dollars(most),
        max_amount_nano=most,
        expected_amount=dollars(expected),
        expected_amount_nano=expected,
        expected_finish_at=await speeds.finish_at(sums.models, tokens),
    )
