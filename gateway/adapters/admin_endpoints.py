"""Shared adapters: uploaded by the operator, granted to tenants."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse

from gateway.adapters import grants, lifecycle
from gateway.adapters.creation import Creation
from gateway.adapters.endpoints import FORM
from gateway.adapters.repository import AdapterRepository, GrantRepository
from gateway.adapters.schemas import (
    AdapterDeleted,
    AdapterObject,
    Grant,
    GrantObject,
    GrantRevoked,
    Promote,
    RevisionObject,
    UploadedAdapter,
    show_adapter,
    show_grant,
    show_revision,
)
from gateway.auth.dependencies import AdminPrincipal
from gateway.auth.idempotency import OperatorIdempotency, OperatorOnce
from gateway.auth.scope import SHARED
from gateway.kit.database import WriteSession
from gateway.kit.dependencies import AppContext, AppTasks
from gateway.kit.pagination import ListObject, PageRequest, list_object, paging
from gateway.kit.task_names import WITHDRAW

router = APIRouter(prefix="/v1/admin/adapters", tags=["admin"])
Paging = Annotated[PageRequest, Depends(paging(100, 1000))]


@router.post("", status_code=201, response_model=UploadedAdapter, openapi_extra=FORM)
async def upload_shared_adapter(
    request: Request, context: AppContext, tasks: AppTasks, idempotency: OperatorIdempotency
) -> JSONResponse:
    """As `POST /v1/adapters`; no tenant sees it until it is granted."""
    return await Creation(context, tasks, SHARED, idempotency).create(request)


@router.get("")
async def list_shared_adapters(
    context: AppContext, operator: AdminPrincipal, page: Paging
) -> ListObject[AdapterObject]:
    async with context.database.read() as session:
        return list_object(await AdapterRepository(session, SHARED).page(page), show_adapter)


@router.get("/{adapter:path}/revisions")
async def list_shared_revisions(
    adapter: str, context: AppContext, operator: AdminPrincipal, page: Paging
) -> ListObject[RevisionObject]:
    async with context.database.read() as session:
        row = await lifecycle.get_adapter(session, SHARED, adapter)
        revisions = await AdapterRepository(session, SHARED).revisions(row.id, page)
        return list_object(revisions, show_revision)


@router.get("/{adapter:path}/grants")
async def list_grants(
    adapter: str, context: AppContext, operator: AdminPrincipal, page: Paging
) -> ListObject[GrantObject]:
    async with context.database.read() as session:
        row = await lifecycle.get_adapter(session, SHARED, adapter)
        return list_object(await GrantRepository(session).page(row.id, page), show_grant)


@router.post("/{adapter:path}/grants", status_code=201, response_model=GrantObject)
async def grant_adapter(adapter: str, wanted: Grant, once: OperatorOnce) -> JSONResponse:
    """The tenant may use it from now on, by its name. Its own adapters keep their names."""

    async def create(session: WriteSession) -> dict[str, Any]:
        return show_grant(await grants.grant(session, adapter, wanted.tenant)).model_dump()

    return await once.answer(create, 201)


@router.delete("/{adapter:path}/grants/{tenant}")
async def revoke_grant(
    adapter: str, tenant: str, context: AppContext, tasks: AppTasks, operator: AdminPrincipal
) -> GrantRevoked:
    """New requests of the tenant answer 404, those that still wait fail so, those that run end."""
    async with context.database.write() as session:
        row, revoked = await grants.revoke(session, adapter, tenant)
    await tasks.send(WITHDRAW, row.id)
    return GrantRevoked(id=revoked.id)


@router.post("/{adapter:path}/promote", response_model=AdapterObject)
async def promote_shared(adapter: str, wanted: Promote, once: OperatorOnce) -> JSONResponse:
    async def change(session: WriteSession) -> dict[str, Any]:
        row = await lifecycle.promote(session, SHARED, adapter, str(wanted.revision))
        return show_adapter(row).model_dump()

    return await once.answer(change)


@router.post("/{adapter:path}/rollback", response_model=AdapterObject)
async def roll_back_shared(adapter: str, once: OperatorOnce) -> JSONResponse:
    async def change(session: WriteSession) -> dict[str, Any]:
        return show_adapter(await lifecycle.roll_back(session, SHARED, adapter)).model_dump()

    return await once.answer(change)


@router.get("/{adapter:path}")
async def get_shared_adapter(
    adapter: str, context: AppContext, operator: AdminPrincipal
) -> AdapterObject:
    async with context.database.read() as session:
        return show_adapter(await lifecycle.get_adapter(session, SHARED, adapter))


@router.delete("/{adapter:path}")
async def delete_shared_adapter(
    adapter: str, context: AppContext, tasks: AppTasks, operator: AdminPrincipal
) -> AdapterDeleted:
    """For every tenant. What runs ends; what still waits fails."""
    async with context.database.write() as session:
        row = await lifecycle.delete_adapter(session, SHARED, adapter)
    await tasks.send(WITHDRAW, row.id)
    return AdapterDeleted(id=row.id)
