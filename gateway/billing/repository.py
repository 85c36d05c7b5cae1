from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select

from gateway.kit.database import ReadSession, WriteSession
from gateway.kit.pagination import Page, PageRequest, fetch_page
from gateway.models import Price


class PriceRepository:
    """Every version of every price; the newest of a model is the one in force."""

    def __init__(self, session: ReadSession | WriteSession) -> None:
        self._session = session

    async def newest(self, models: Sequence[str]) -> dict[str, Price]:
        """By model, for those that have a price."""
        rows = select(Price).where(Price.model.in_(models)).order_by(Price.created_at, Price.id)
        return {price.model: price for price in await self._session.scalars(rows)}

    async def page(self, model: str | None, page: PageRequest) -> Page[Price]:
        rows = select(Price) if model is None else select(Price).where(Price.model == model)
        return await fetch_page(self._session, Price, rows, page)

    def add(self, price: Price) -> None:
        self._session.add(price)
