"""Pump 2: queued rows into the queue, at most a window of them per tenant and class."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import structlog

from gateway.adapters.repository import prompt_formats
from gateway.collector.backlog import Queued, Share, next_queued, outstanding, waiting
from gateway.errors import BadRequest
from gateway.jobs.bodies import JsonBody, input_keys, load_bodies
from gateway.jobs.dispatch import Prepared, dispatch
from gateway.jobs.generation import parse_generation
from gateway.jobs.locking import lock
from gateway.jobs.settlement import Settlement, settle
from gateway.jobs.withdrawal import end_withdrawn, withdrawn_among
from gateway.kit.context import Context
from gateway.kit.prompts import Prompts

CHUNK = 200

_log = structlog.get_logger(__name__)


class Dispatcher:
    def __init__(self, context: Context, model: str, prompts: Prompts) -> None:
        self._context = context
        self._model = model
        self._prompts = prompts

    async def fill(self) -> int:
        """Tops up every share's window, in turns of a chunk. Returns how many were enqueued."""
        async with self._context.database.read() as session:
            shares = await waiting(session, self._model)
            out = await outstanding(session, self._model) if shares else {}
        room = {share: self._context.settings.queue_window - out.get(share, 0) for share in shares}
        total = 0
        while open_shares := [share for share in shares if room[share] > 0]:
            for share in open_shares:
                taken, enqueued = await self._dispatch_some(share, min(CHUNK, room[share]))
                room[share] = room[share] - taken if taken else 0
                total += enqueued
        return total

    async def _dispatch_some(self, share: Share, limit: int) -> tuple[int, int]:
        async with self._context.database.read() as session:
            rows = await next_queued(session, self._model, share, limit)
            keys = await input_keys(session, rows)
            formats = await prompt_formats(session, {row.adapter_revision_id for row in rows})
        if not rows:
            return 0, 0
        bodies = await load_bodies(self._context.store, keys, rows)
        prompts = {
            revision: self._prompts.of_adapter(own, self._context.templates)
            for revision, own in formats.items()
        }
        prepared, refused = await asyncio.to_thread(self._prepare, rows, bodies, prompts)
        if refused:
            await self._refuse(refused)
        enqueued = await dispatch(self._context, self._model, prepared)
        if enqueued < len(prepared):
            await self._end_withdrawn([each.request_id for each in prepared])
        return len(rows), enqueued

    async def _end_withdrawn(self, ids: Sequence[str]) -> None:
        """Some were not free to go: because their adapter is gone, perhaps."""
        async with self._context.database.read() as session:
            withdrawn = await withdrawn_among(session, ids)
        if withdrawn:
            await end_withdrawn(self._context, withdrawn)

    def _prepare(
        self,
        rows: Sequence[Queued],
        bodies: Mapping[str, JsonBody],
        prompts_of: Mapping[str | None, Prompts],
    ) -> tuple[list[Prepared], dict[str, Settlement]]:
        prepared, refused = [], {}
        for row in rows:
            prompts = prompts_of.get(row.adapter_revision_id, self._prompts)
            try:
                generation = parse_generation(row.endpoint, bodies[row.id], prompts, row.seed)
            except BadRequest as error:
                refused[row.id] = Settlement("failed", error.status, error.body())
                continue
            ids, sampling = generation.prompt_ids, generation.sampling
            prepared.append(Prepared(row.id, ids, sampling, generation.stream))
        return prepared, refused

    async def _refuse(self, refused: Mapping[str, Settlement]) -> None:
        """Accepted once, and no longer: the base model's files have changed since, or an adapter's
        template gives another answer."""
        _log.warning("requests_refused_at_dispatch", model=self._model, count=len(refused))
        async with self._context.database.write() as session:
            locked = await lock(session, refused)
            await settle(session, locked, refused)
