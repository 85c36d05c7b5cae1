from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from sqlalchemy import Select, delete, exists, func, literal, select, update

from gateway.auth.scope import TenantScope
from gateway.jobs.states import is_out
from gateway.kit.clock import now_ms
from gateway.kit.database import Database, ReadSession, WriteSession
from gateway.kit.pagination import Page, PageRequest, fetch_page
from gateway.kit.sql import insert_ignoring
from gateway.models import Batch, Request, Result, Tenant
from gateway.models.base import Json

Session = ReadSession | WriteSession
_PAGE = 500


class BatchRepository:
    """One tenant's batches."""

    def __init__(self, session: Session, scope: TenantScope) -> None:
        self._session = session
        self._scope = scope

    def _all(self) -> Select[Batch]:
        return select(Batch).where(Batch.tenant_id == self._scope.tenant_id)

    async def get(self, batch_id: str, lock: bool = False) -> Batch | None:
        row = self._all().where(Batch.id == batch_id)
        return await self._session.scalar(row.with_for_update(key_share=True) if lock else row)

    async def page(self, page: PageRequest) -> Page[Batch]:
        return await fetch_page(self._session, Batch, self._all(), page)

    def add(self, row: Batch) -> None:
        self._session.add(row)

    async def lock_tenant(self) -> None:
        """Serialises decisions about what the tenant may have enqueued."""
        await self._session.execute(
            select(Tenant.id)
            .where(Tenant.id == self._scope.tenant_id)
            .with_for_update(key_share=True)
        )

    async def enqueued_tokens(self, model: str | None) -> int:
        """Prompt tokens of the tenant's running batches of one model."""
        total = await self._session.scalar(
            select(func.sum(Batch.enqueued_tokens)).where(
                Batch.tenant_id == self._scope.tenant_id,
                Batch.status.in_(("in_progress", "cancelling")),
                Batch.model == model if model is not None else Batch.model.is_(None),
            )
        )
        return int(total or 0)


class LineRepository:
    """The lines of one batch. Statements over many rows run inside the database."""

    def __init__(self, session: Session, batch_id: str) -> None:
        self._session = session
        self._batch_id = batch_id

    async def custom_ids(self) -> set[str]:
        rows = await self._session.scalars(
            select(Request.custom_id).where(Request.batch_id == self._batch_id)
        )
        return {custom_id for custom_id in rows if custom_id is not None}

    async def models(self) -> Sequence[str]:
        """Names that valid lines ask for; two are enough to know that there are several."""
        rows = select(Request.model).where(
            Request.batch_id == self._batch_id, Request.state == "held"
        )
        return (await self._session.scalars(rows.distinct().limit(2))).all()

    async def release(self) -> None:
        """Validation is over: held lines may run."""
        await self._session.execute(
            update(Request)
            .where(Request.batch_id == self._batch_id, Request.state == "held")
            .values(state="queued")
            .execution_options(synchronize_session=False)
        )

    async def drop(self) -> None:
        """Lines that never ran, with what validation said of them."""
        of_batch = select(Request.id).where(Request.batch_id == self._batch_id)
        for statement in (
            delete(Result).where(Result.request_id.in_(of_batch)),
            delete(Request).where(Request.batch_id == self._batch_id),
        ):
            await self._session.execute(statement.execution_options(synchronize_session=False))

    async def out(self) -> list[tuple[str, str]]:
        """(base model, request id) of lines that are in the queue or run."""
        rows = await self._session.execute(
            select(Request.base_model, Request.id).where(
                Request.batch_id == self._batch_id, is_out()
            )
        )
        return [(row[0], row[1]) for row in rows]

    async def end(
        self, session: WriteSession, states: Sequence[str], state: str, error: dict[str, str]
    ) -> list[int]:
        """Ends lines in `states` with the same error. Returns their prompt tokens."""
        ended = await session.scalars(
            update(Request)
            .where(Request.batch_id == self._batch_id, Request.state.in_(states))
            .values(state=state, finished_at=now_ms())
            .returning(Request.prompt_tokens)
            .execution_options(synchronize_session=False)
        )
        tokens = list(ended)
        without = select(Request.id, literal(error, Json), literal(now_ms())).where(
            Request.batch_id == self._batch_id,
            Request.state == state,
            ~exists().where(Result.request_id == Request.id),
        )
        columns = ["request_id", "error", "created_at"]
        await session.execute(insert_ignoring(session, Result).from_select(columns, without))
        return tokens


async def finished_lines(
    database: Database, batch_id: str, states: Sequence[str]
) -> AsyncIterator[tuple[Request, Result]]:
    """Lines in `states` with their results, in input order, in pages of short reads."""
    last = 0
    while True:
        async with database.read() as session:
            rows = await session.execute(
                select(Request, Result)
                .join(Result, Result.request_id == Request.id)
                .where(
                    Request.batch_id == batch_id,
                    Request.line_no > last,
                    Request.state.in_(states),
                )
                .order_by(Request.line_no)
                .limit(_PAGE)
            )
            page = [(row[0], row[1]) for row in rows]
        for request, result in page:
            yield request, result
        if len(page) < _PAGE:
            return
        last = page[-1][0].line_no or last
