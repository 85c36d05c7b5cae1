"""Adds a revision, once for an Idempotency-Key, and tells the control processes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse

from gateway.adapters.lifecycle import Owner, add_revision
from gateway.adapters.schemas import show_adapter, show_revision
from gateway.adapters.upload import discard, receive_adapter
from gateway.auth.idempotency import Idempotency
from gateway.kit.context import Context
from gateway.kit.database import WriteSession
from gateway.kit.task_names import INGEST
from gateway.kit.tasks import Tasks

Check = Callable[[WriteSession], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Creation:
    """One call that uploads an adapter of `owner`; `check` may refuse it, its rows added."""

    context: Context
    tasks: Tasks
    owner: Owner
    idempotency: Idempotency
    check: Check | None = None

    async def create(self, request: Request) -> JSONResponse:
        """What no revision is made of goes from the store. Raises BadRequest, PayloadTooLarge,
        Conflict, and what `check` raises."""
        upload = await receive_adapter(self.context, request)
        kept = False
        try:
            async with self.context.database.write() as session:

                async def create() -> dict[str, Any]:
                    nonlocal kept
                    adapter, revision = await add_revision(session, self.owner, upload)
                    if self.check is not None:
                        await self.check(session)
                    kept = True
                    shown = show_adapter(adapter).model_dump()
                    return {**shown, "revision": show_revision(revision).model_dump()}

                response = await self.idempotency.once(session, upload.fingerprint, create, 201)
        finally:
            if not kept:
                await discard(self.context, upload)
        if kept:
            await self.tasks.send(INGEST, upload.revision_id)
        return response
