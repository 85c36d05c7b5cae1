from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse

from gateway.auth.dependencies import AdminPrincipal
from gateway.auth.idempotency import OperatorOnce
from gateway.billing import service
from gateway.billing.repository import PriceRepository
from gateway.billing.schemas import PriceObject, SetPrice, show_price
from gateway.kit.database import WriteSession
from gateway.kit.dependencies import AppContext
from gateway.kit.pagination import ListObject, PageRequest, list_object, paging

router = APIRouter(prefix="/v1/admin/prices", tags=["admin"])


@router.get("")
async def list_prices(
    context: AppContext,
    operator: AdminPrincipal,
    page: Annotated[PageRequest, Depends(paging(100, 1000))],
    model: str | None = None,
) -> ListObject[PriceObject]:
    """Every version, newest first: the first of a model is in force."""
    async with context.database.read() as session:
        return list_object(await PriceRepository(session).page(model, page), show_price)


@router.post("", status_code=201, response_model=PriceObject)
async def set_price(wanted: SetPrice, once: OperatorOnce) -> JSONResponse:
    """A new version, for what is submitted from now on."""

    async def create(session: WriteSession) -> dict[str, Any]:
        price = await service.set_price(session, **wanted.model_dump())
        return show_price(price).model_dump()

    return await once.answer(create, 201)
