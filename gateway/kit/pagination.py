"""Lists as OpenAI pages them: `limit`, `after` (the last id seen), `order`; newest first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

from fastapi import Query
from pydantic import BaseModel
from sqlalchemy import Select, asc, desc, literal, tuple_
from sqlalchemy.orm import DeclarativeBase, class_mapper

from gateway.errors import BadRequest
from gateway.kit.database import ReadSession, WriteSession

Order = Literal["asc", "desc"]


@dataclass(frozen=True, slots=True)
class PageRequest:
    limit: int
    after: str | None = None
    order: Order = "desc"


RowT = TypeVar("RowT", bound=DeclarativeBase)
ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True)
class Page(Generic[RowT]):
    rows: list[RowT]
    has_more: bool


class ListObject(BaseModel, Generic[ItemT]):
    object: Literal["list"] = "list"
    data: list[ItemT]
    first_id: str | None
    last_id: str | None
    has_more: bool


def paging(default: int, most: int) -> Callable[..., PageRequest]:
    """A dependency: `Annotated[PageRequest, Depends(paging(20, 100))]`."""

    def page_request(
        limit: int = Query(default, ge=1, le=most),  # a closure: no annotation can name it
        after: Annotated[str | None, Query(description="The last id of the page before")] = None,
        order: Annotated[Order, Query(description="By time of creation")] = "desc",
    ) -> PageRequest:
        return PageRequest(limit, after, order)

    return page_request


async def fetch_page(
    session: ReadSession | WriteSession,
    model: type[RowT],
    rows: Select[RowT],
    page: PageRequest,
    cursors: Select[RowT] | None = None,
) -> Page[RowT]:
    """`rows` must already be confined to the caller's tenant. `cursors` are the rows that
    `after` may name, when they are more than `rows` (deleted ones). Raises BadRequest."""
    columns = class_mapper(model).columns
    created_at, row_id = columns["created_at"], columns["id"]
    place = tuple_(created_at, row_id)
    if page.after is not None:
        known = rows if cursors is None else cursors
        cursor = await session.scalar(known.where(row_id == page.after))
        if cursor is None:
            raise BadRequest(
                f"No object with id '{page.after}'.", param="after", code="invalid_value"
            )
        seen = tuple_(*(literal(value) for value in _place(cursor)))
        rows = rows.where(place > seen if page.order == "asc" else place < seen)
    direction = asc if page.order == "asc" else desc
    rows = rows.order_by(direction(created_at), direction(row_id)).limit(page.limit + 1)
    found = list(await session.scalars(rows))
    return Page(found[: page.limit], len(found) > page.limit)


def list_object(page: Page[RowT], show: Callable[[RowT], ItemT]) -> ListObject[ItemT]:
    ids = [_place(row)[1] for row in page.rows]
    return ListObject(
        data=[show(row) for row in page.rows],
        first_id=ids[0] if ids else None,
        last_id=ids[-1] if ids else None,
        has_more=page.has_more,
    )


def _place(row: Any) -> tuple[int, str]:
    return row.created_at, row.id
