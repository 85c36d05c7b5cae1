"""Checks lines of an input file: shape, uniqueness, model, parameters and length."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.auth.scope import TenantScope
from gateway.batches.lines import (
    LineRefused,
    ParsedLine,
    RawLine,
    duplicate,
    model_unknown,
    parse_line,
    refused_body,
)
from gateway.errors import ApiError, NotFound
from gateway.jobs.submission import Plan, Target, plan_with, resolve_target
from gateway.kit.context import Context
from gateway.kit.prompts import Prompts
from gateway.models import Batch

THREADS = min(4, os.cpu_count() or 1)


@dataclass(slots=True)
class Checked:
    """A chunk's lines, in order: those that may run, and those that may not."""

    plans: list[tuple[RawLine, ParsedLine, Plan]] = field(default_factory=list)
    refused: list[tuple[RawLine, LineRefused]] = field(default_factory=list)


@dataclass(slots=True)
class Checker:
    """`seen` are the custom_ids of earlier lines. Models are resolved once each."""

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
        return await self._plan_all(parsed)

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
                self.targets[model] = (target, await target.prompts(self.context))
            except ApiError as error:
                if error.status >= 500:
                    raise
                self.targets[model] = error

    async def _plan_all(
        self, parsed: Sequence[tuple[RawLine, ParsedLine | LineRefused]]
    ) -> Checked:
        """In threads, a core each: nearly all of the time is the tokenizer's, without the GIL."""
        share = -(-len(parsed) // THREADS)
        parts = [parsed[start : start + share] for start in range(0, len(parsed), share or 1)]
        done = await asyncio.gather(*(asyncio.to_thread(self._plan, part) for part in parts))
        return Checked(
            [each for part in done for each in part.plans],
            [each for part in done for each in part.refused],
        )

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
