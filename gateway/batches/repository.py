from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import Select, Text, cast, delete, exists, func, literal, select, update

from gateway.auth.limits import Limits
from gateway.auth.scope import TenantScope
from gateway.kit.clock import now_ms
from gateway.kit.database import Database, ReadSession, WriteSession
from gateway.kit.pagination import Page, PageRequest, fetch_page
from gateway.kit.sql import insert_ignoring
from gateway.models import Batch, BatchModel, Request, Result, Tenant
from gateway.models.base import Json
from gateway.models.request import is_out

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

    async def lock_tenant(self) -> Limits:
        """Serialises decisions about what the tenant may have enqueued."""
        limits = await self._session.scalar(
            select(Tenant.limits)
            .where(Tenant.id == self._scope.tenant_id)
            .with_for_update(key_share=True)
        )
        return Limits.model_validate(limits)

    async def enqueued_tokens(self) -> Mapping[str, int]:
        """Prompt tokens that wait in the tenant's running batches, by model."""
        running = (
            Batch.tenant_id == self._scope.tenant_id,
            Batch.status.in_(("in_progress", "cancelling")),
        )
        of_one = select(Batch.model, func.sum(Batch.enqueued_tokens))
        of_several = select(BatchModel.model, func.sum(BatchModel.enqueued_tokens))
        totals: dict[str, int] = defaultdict(int)
        for rows in (
            of_one.where(*running, Batch.model.is_not(None)).group_by(Batch.model),
            of_several.join(Batch, Batch.id == BatchModel.batch_id)
            .where(*running)
            .group_by(BatchModel.model),
        ):
            for model, tokens in await self._session.execute(rows):
                totals[str(model)] += int(tokens)
        return totals


class HeldLines(NamedTuple):
    model: str
    prompt_tokens: int
    reserved_nano: int


class EndedLine(NamedTuple):
    model: str
    prompt_tokens: int
    reserved_nano: int


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

    async def held(self) -> list[HeldLines]:
        """What valid lines ask for, by model."""
        rows = select(
            Request.model, func.sum(Request.prompt_tokens), func.sum(Request.reserved_nano)
        ).where(Request.batch_id == self._batch_id, Request.state == "held")
        rows = rows.group_by(Request.model).order_by(Request.model)
        return [
            HeldLines(model, int(tokens), int(nano))
            for model, tokens, nano in await self._session.execute(rows)
        ]

    async def begin_models(self, held: Sequence[HeldLines]) -> None:
        """For a batch of several models: what waits of each."""
        self._session.add_all(
            BatchModel(batch_id=self._batch_id, model=of.model, enqueued_tokens=of.prompt_tokens)
            for of in held
        )
        await self._session.flush()

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
    ) -> list[EndedLine]:
        """Ends lines in `states` with the same error."""
        ended = await session.execute(
            update(Request)
            .where(Request.batch_id == self._batch_id, Request.state.in_(states))
            .values(state=state, finished_at=now_ms())
            .returning(Request.model, Request.prompt_tokens, Request.reserved_nano)
            .execution_options(synchronize_session=False)
        )
        lines = [EndedLine(*row) for row in ended]
        without = select(Request.id, literal(error, Json), literal(now_ms())).where(
            Request.batch_id == self._batch_id,
            Request.state == state,
            ~exists().where(Result.request_id == Request.id),
        )
        columns = ["request_id", "error", "created_at"]
        await session.execute(insert_ignoring(session, Result).from_select(columns, without))
        return lines


class FinishedLine(NamedTuple):
    """What files say of a line. `body` and `error` are JSON, as the database spells it: most of
    a batch's output need not be taken apart to be written."""

    id: str
    line_no: int | None
    custom_id: str | None
    input_offset: int | None
    input_length: int | None
    status_code: int | None
    body: str | None
    error: str | None


async def finished_lines(
    database: Database, batch_id: str, states: Sequence[str]
) -> AsyncIterator[FinishedLine]:
    """Lines in `states` with their results, in input order, in pages of short reads."""
    last = 0
    while True:
        async with database.read() as session:
            rows = await session.execute(
                select(
                    Request.id,
                    Request.line_no,
                    Request.custom_id,
                    Request.input_offset,
                    Request.input_length,
                    Result.status_code,
                    cast(Result.body, Text),
                    cast(Result.error, Text),
                )
                .join(Result, Result.request_id == Request.id)
                .where(
                    Request.batch_id == batch_id,
                    Request.line_no > last,
                    Request.state.in_(states),
                )
                .order_by(Request.line_no)
                .limit(_PAGE)
            )
            page = [FinishedLine(*row) for row in rows]
        for line in page:
            yield line
        if len(page) < _PAGE:
            return
        last = page[-1].line_no or last
