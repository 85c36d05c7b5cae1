from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse, Response

from gateway.auth.dependencies import AdminPrincipal, CurrentPrincipal
from gateway.auth.idempotency import OperatorOnce
from gateway.billing import corrections, invoices, storage
from gateway.billing.invoice_repository import InvoiceRepository
from gateway.billing.invoice_schemas import (
    Correct,
    CorrectionObject,
    InvoiceObject,
    InvoiceSummary,
    SetStoragePrice,
    StoragePriceObject,
    invoice_csv,
    show_correction,
    show_invoice,
    show_storage_price,
    show_summary,
)
from gateway.billing.storage_repository import StorageRepository
from gateway.kit.context import Context
from gateway.kit.database import WriteSession
from gateway.kit.dependencies import AppContext
from gateway.kit.pagination import ListObject, PageRequest, list_object, paging
from gateway.tenants.service import find_tenant

router = APIRouter()
Paging = Annotated[PageRequest, Depends(paging(100, 1000))]


@router.get("/v1/invoices", tags=["usage"])
async def list_invoices(
    context: AppContext,
    principal: CurrentPrincipal,
    page: Annotated[PageRequest, Depends(paging(20, 100))],
) -> ListObject[InvoiceSummary]:
    """Closed months, newest first; the first page has the drafts of those that are not, too."""
    async with context.database.read() as session:
        repository = InvoiceRepository(session, principal.scope)
        listed = list_object(await repository.page(page), show_summary)
        if page.after is None and page.order == "desc":
            drafts = [
                (await invoices.draft(repository, principal.tenant_id, month))[0]
                for month in await invoices.draft_months(repository)
            ]
            listed.data[:0] = [show_summary(each, is_final=False) for each in drafts]
    return listed


@router.get(
    "/v1/invoices/{invoice_id}.csv",
    tags=["usage"],
    response_class=Response,
    responses={200: {"content": {"text/csv": {"schema": {"type": "string"}}}}},
)
async def get_invoice_csv(
    invoice_id: str, context: AppContext, principal: CurrentPrincipal
) -> Response:
    shown = await _invoice(context, principal, invoice_id)
    headers = {"content-disposition": f'attachment; filename="{shown.id}.csv"'}
    return Response(invoice_csv(shown), media_type="text/csv; charset=utf-8", headers=headers)


@router.get("/v1/invoices/{invoice_id}", tags=["usage"])
async def get_invoice(
    invoice_id: str, context: AppContext, principal: CurrentPrincipal
) -> InvoiceObject:
    return await _invoice(context, principal, invoice_id)


@router.post(
    "/v1/admin/corrections", status_code=201, response_model=CorrectionObject, tags=["admin"]
)
async def correct(wanted: Correct, once: OperatorOnce) -> JSONResponse:
    """Bill more or less for a request, on the running month's invoice."""

    async def create(session: WriteSession) -> dict[str, Any]:
        row = await corrections.correct(session, **wanted.model_dump())
        return show_correction(row).model_dump()

    return await once.answer(create, 201)


@router.get("/v1/admin/corrections", tags=["admin"])
async def list_corrections(
    context: AppContext, operator: AdminPrincipal, page: Paging, tenant: str | None = None
) -> ListObject[CorrectionObject]:
    async with context.database.read() as session:
        owner = tenant and (await find_tenant(session, tenant)).id
        found = await corrections.corrections(session, owner, page)
    return list_object(found, show_correction)


@router.get("/v1/admin/storage_prices", tags=["admin"])
async def list_storage_prices(
    context: AppContext, operator: AdminPrincipal, page: Paging
) -> ListObject[StoragePriceObject]:
    """Every version, newest first: the first is in force."""
    async with context.database.read() as session:
        return list_object(await StorageRepository(session).page(page), show_storage_price)


@router.post(
    "/v1/admin/storage_prices", status_code=201, response_model=StoragePriceObject, tags=["admin"]
)
async def set_storage_price(wanted: SetStoragePrice, once: OperatorOnce) -> JSONResponse:
    """A new version, for the hours that begin from now on."""

    async def create(session: WriteSession) -> dict[str, Any]:
        price = await storage.set_storage_price(session, wanted.gib_hour_nano)
        return show_storage_price(price).model_dump()

    return await once.answer(create, 201)


async def _invoice(context: Context, principal: CurrentPrincipal, invoice_id: str) -> InvoiceObject:
    async with context.database.read() as session:
        return show_invoice(*await invoices.find_invoice(session, principal.scope, invoice_id))
