from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse

from gateway.auth.dependencies import AdminPrincipal
from gateway.auth.idempotency import Once, OperatorOnce
from gateway.auth.keys import NewKey, derive_key, new_seed
from gateway.auth.limits import Limits
from gateway.errors import BadRequest
from gateway.kit.context import Context
from gateway.kit.database import WriteSession
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
    show_tenant,
)
from gateway.tenants.service import CreatedKey

router = APIRouter(prefix="/v1/admin", tags=["admin"])
Paging = Annotated[PageRequest, Depends(paging(100, 1000))]

_SEED = "seed"
"""In what is stored for an Idempotency-Key, in place of the secret."""


@router.post("/tenants", status_code=201, response_model=TenantObject)
async def create_tenant(wanted: CreateTenant, once: OperatorOnce) -> JSONResponse:
    async def create(session: WriteSession) -> dict[str, Any]:
        tenant = await service.create_tenant(session, wanted.name, wanted.weight)
        return show_tenant(tenant).model_dump()

    return await once.answer(create, 201)


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


@router.post("/tenants/{tenant}", response_model=TenantObject)
async def update_tenant(tenant: str, wanted: UpdateTenant, once: OperatorOnce) -> JSONResponse:
    async def update(session: WriteSession) -> dict[str, Any]:
        row = await service.update_tenant(session, tenant, wanted.weight, wanted.suspended)
        return show_tenant(row).model_dump()

    return await once.answer(update)


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


@router.post("/limits", response_model=LimitsObject)
async def set_limits(wanted: SetLimits, once: OperatorOnce) -> JSONResponse:
    """In force for the tenant's next request."""
    limits = Limits.model_validate(wanted.model_dump(exclude={"tenant"}))

    async def change(session: WriteSession) -> dict[str, Any]:
        return show_limits(await service.set_limits(session, wanted.tenant, limits)).model_dump()

    return await once.answer(change)


@router.post("/keys", status_code=201, response_model=NewKeyObject)
async def create_key(wanted: CreateKey, context: AppContext, once: OperatorOnce) -> JSONResponse:
    """The answer shows the key, once; the same call with the same `Idempotency-Key` shows it
    again."""
    if wanted.admin == (wanted.tenant is not None):
        raise BadRequest("Name a tenant, or ask for an admin key.", param="tenant")
    expires_at = wanted.expires_at and wanted.expires_at * 1000

    async def create(session: WriteSession, new: NewKey) -> CreatedKey:
        owner = wanted.tenant and (await service.find_tenant(session, wanted.tenant)).id
        return await service.create_key(session, owner, wanted.name, wanted.scopes, expires_at, new)

    return await _answer_with_key(context, once, create)


@router.get("/keys")
async def list_keys(
    context: AppContext, operator: AdminPrincipal, page: Paging, tenant: str | None = None
) -> ListObject[KeyObject]:
    async with context.database.read() as session:
        owner = tenant and (await service.find_tenant(session, tenant)).id
        return list_object(await TenantRepository(session).keys(owner, page), show_key)


@router.post("/keys/{key_id}/rotate", status_code=201, response_model=NewKeyObject)
async def rotate_key(
    key_id: str, wanted: RotateKey, context: AppContext, once: OperatorOnce
) -> JSONResponse:
    """A new key with the same rights, shown as by creating one."""

    async def create(session: WriteSession, new: NewKey) -> CreatedKey:
        return await service.rotate_key(session, key_id, wanted.overlap_seconds, new)

    return await _answer_with_key(context, once, create)


@router.delete("/keys/{key_id}")
async def revoke_key(key_id: str, context: AppContext, operator: AdminPrincipal) -> KeyObject:
    """The key stops working at once."""
    async with context.database.write() as session:
        key = await service.revoke_key(session, key_id)
    return show_key(key)


async def _answer_with_key(
    context: Context,
    once: Once,
    create: Callable[[WriteSession, NewKey], Awaitable[CreatedKey]],
) -> JSONResponse:
    """Of the secret the seed alone is stored, for as long as the Idempotency-Key."""

    async def seeded(session: WriteSession) -> dict[str, Any]:
        seed = new_seed()
        created = await create(session, derive_key(context.secret_key, seed))
        return {**show_key(created.key).model_dump(), _SEED: seed}

    async def reveal(session: WriteSession, kept: dict[str, Any]) -> dict[str, Any]:
        seed = kept.pop(_SEED)
        secret = await service.secret_of(session, context.secret_key, kept["id"], seed)
        return {**kept, "secret": secret}

    return await once.answer(seeded, 201, reveal)
