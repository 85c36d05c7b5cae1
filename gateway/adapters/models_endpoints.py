from __future__ import annotations

from fastapi import APIRouter

from gateway.adapters.repository import AdapterRepository, BaseModelRepository
from gateway.adapters.schemas import (
    ModelList,
    ModelObject,
    show_adapter_model,
    show_base_model,
)
from gateway.adapters.service import resolve_model
from gateway.auth.dependencies import CurrentPrincipal
from gateway.kit.dependencies import AppContext

router = APIRouter(prefix="/v1/models", tags=["models"])


@router.get("")
async def list_models(context: AppContext, principal: CurrentPrincipal) -> ModelList:
    """Base models, then the tenant's adapters that answer to their name."""
    async with context.database.read() as session:
        bases = {row.name: row for row in await BaseModelRepository(session).all()}
        adapters = await AdapterRepository(session, principal.scope).promoted()
    data = [show_base_model(row) for row in bases.values()]
    data += [show_adapter_model(row, top, bases[row.base_model]) for row, top in adapters]
    return ModelList(data=data)


@router.get("/{model:path}")
async def get_model(model: str, context: AppContext, principal: CurrentPrincipal) -> ModelObject:
    async with context.database.read() as session:
        found = await resolve_model(session, principal.scope, model)
    if found.adapter is None or found.revision is None:
        return show_base_model(found.base)
    return show_adapter_model(found.adapter, found.revision, found.base)
