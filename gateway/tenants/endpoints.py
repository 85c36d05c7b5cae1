from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends

from gateway.auth.dependencies import AdminPrincipal
from gateway.auth.limits import Limits
from gateway.errors import BadRequest
from gateway.kit.dependencies import AppContext
from gateway.kit.pagination import ListObject, PageRequest, list_object, paging
from gateway.tenants import service
from gateway.tenants.repository import TenantRepository
from gateway.tenants.schemas import (
    CreateKey,
    CreateTenant,
    KeyObject,
    LimitsObject,
    NewKeyObject,
    RotateKey,
    SetLimits,
    TenantObject,
    UpdateTenant,
    show_key,
    show_limits,
    show_new_key,
    show_tenant,
)

router = APIRouter(prefix="/v1/admin", tags=["admin"])
Paging = Annotated[PageRequest, Depends(paging(100, 1000))]


@router.post("/tenants", status_code=201)
async def create_tenant(
    wanted: CreateTenant, context: AppContext, operator: AdminPrincipal
) -> TenantObject:
    async with context.database.write() as session:
        tenant = await service.create_tenant(session, wanted.name, wanted.weight)
    return show_tenant(tenant)


@router.get("/tenants")
async def list_tenants(
    context: AppContext, operator: AdminPrincipal, page: Paging
) -> ListObject[TenantObject]:
    async with context.database.read() as session:
        return list_object(await TenantRepository(session).page(page), show_tenant)


@router.get("/tenants/{tenant}")
async def get_tenant(tenant: str, context: AppContext, operator: AdminPrincipal) -> TenantObject:
    async with context.database.read() as session:
        return show_tenant(await service.find_tenant(session, tenant))


@router.post("/tenants/{tenant}")
async def update_tenant(
    tenant: str, wanted: UpdateTenant, context: AppContext, operator: AdminPrincipal
) -> TenantObject:
    async with context.database.write() as session:
        row = await service.update_tenant(session, tenant, wanted.weight, wanted.suspended)
    return show_tenant(row)


@router.get("/limits")
async def list_limits(
    context: AppContext, operator: AdminPrincipal, page: Paging
) -> ListObject[LimitsObject]:
    async with context.database.read() as session:
        return list_object(await TenantRepository(session).page(page), show_limits)


@router.get("/limits/{tenant}")
async def get_limits(tenant: str, context: AppContext, operator: AdminPrincipal) -> LimitsObject:
    async with context.database.read() as session:
        return show_limits(await service.find_tenant(session, tenant))


@router.post("/limits")
async def set_limits(
    wanted: SetLimits, context: AppContext, operator: AdminPrincipal
) -> LimitsObject:
    """In force for the tenant's next request."""
    limits = Limits.model_validate(wanted.model_dump(exclude={"tenant"}))
    async with context.database.write() as session:
        return show_limits(await service.set_limits(session, wanted.tenant, limits))


@router.post("/keys", status_code=201)
async def create_key(
    wanted: CreateKey, context: AppContext, operator: AdminPrincipal
) -> NewKeyObject:
    if wanted.admin == (wanted.tenant is not None):
        raise BadRequest("Name a tenant, or ask for an admin key.", param="tenant")
    expires_at = wanted.expires_at and wanted.expires_at * 1000
    async with context.database.write() as session:
        owner = wanted.tenant and (await service.find_tenant(session, wanted.tenant)).id
        created = await service.create_key(session, owner, wanted.name, wanted.scopes, expires_at)
    return show_new_key(created)


@router.get("/keys")
async def list_keys(
    context: AppContext, operator: AdminPrincipal, page: Paging, tenant: str | None = None
) -> ListObject[KeyObject]:
    async with context.database.read() as session:
        owner = tenant and (await service.find_tenant(session, tenant)).id
        return list_object(await TenantRepository(session).keys(owner, page), show_key)


@router.post("/keys/{key_id}/rotate", status_code=201)
async def rotate_key(
    key_id: str, wanted: RotateKey, context: AppContext, operator: AdminPrincipal
) -> NewKeyObject:
    async with context.database.write() as session:
        created = await service.rotate_key(session, key_id, wanted.overlap_seconds)
    return show_new_key(created)


@router.delete("/keys/{key_id}")
async def revoke_key(key_id: str, context: AppContext, operator: AdminPrincipal) -> KeyObject:
    """The key stops working at once."""
    async with context.database.write() as session:
        key = await service.revoke_key(session, key_id)
    return show_key(key)
