"""Creates a batch, once for an Idempotency-Key, and tells the control processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi.responses import JSONResponse

from gateway.auth.idempotency import Once
from gateway.auth.principal import Principal
from gateway.batches import service
from gateway.batches.repository import BatchRepository
from gateway.batches.schemas import CreateBatch, show_batch
from gateway.kit.context import Context
from gateway.kit.database import WriteSession
from gateway.kit.store import delete_blob
from gateway.kit.task_names import VALIDATE
from gateway.kit.tasks import Tasks
from gateway.models import File
from gateway.tenants.admission import Admission


@dataclass(frozen=True, slots=True)
class Creation:
    """One call that creates a batch."""

    context: Context
    tasks: Tasks
    principal: Principal
    once: Once
    admission: Admission

    async def create(self, wanted: CreateBatch, inline: File | None) -> JSONResponse:
        """`inline` is an input file whose row is not added yet: its blob goes when no batch is
        made of it. Raises BadRequest (input file), Conflict (`idempotency_conflict`),
        TooManyRequests."""
        created: list[str] = []

        async def create(session: WriteSession) -> dict[str, Any]:
            if inline is not None:
                session.add(inline)
                await session.flush()
            file = inline or await service.input_file(
                session, self.principal.scope, wanted.input_file_id or ""
            )
            batch = service.new_batch(self.principal, wanted, file)
            BatchRepository(session, self.principal.scope).add(batch)
            await session.flush()
            created.append(batch.id)
            return show_batch(batch).model_dump()

        try:
            await self.admission.admit_batch()
            response = await self.once.answer(create)
        finally:
            if inline is not None and not created:
                await delete_blob(self.context.store, inline.store_key)
        for batch_id in created:
            await self.tasks.send(VALIDATE, batch_id)
        return response
