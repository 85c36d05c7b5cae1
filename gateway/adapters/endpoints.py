from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse

from gateway.adapters import lifecycle
from gateway.adapters.creation import Creation
from gateway.adapters.quota import check_quota
from gateway.adapters.repository import AdapterRepository
from gateway.adapters.schemas import (
    AdapterDeleted,
    AdapterObject,
    Promote,
    RevisionObject,
    UploadedAdapter,
    show_adapter,
    show_revision,
)
from gateway.auth.dependencies import CurrentPrincipal
from gateway.auth.idempotency import CurrentIdempotency, CurrentOnce
from gateway.kit.database import WriteSession
from gateway.kit.dependencies import AppContext, AppTasks
from gateway.kit.pagination import ListObject, PageRequest, list_object, paging
from gateway.kit.task_names import WITHDRAW

router = APIRouter(prefix="/v1/adapters", tags=["adapters"])
Paging = Annotated[PageRequest, Depends(paging(20, 100))]

FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["name", "files"],
                    "properties": {
                        "name": {"type": "string"},
                        "base_model": {"type": "string"},
                        "files": {
                            "type": "array",
                            "items": {"type": "string", "format": "binary"},
                            "description": "adapter_config.json and adapter_model.safetensors, "
                            "or one .zip or .tar.gz",
                        },
                    },
                }
            }
        },
    }
}


@router.post("", status_code=201, response_model=UploadedAdapter, openapi_extra=FORM)
async def upload_adapter(
    request: Request,
    context: AppContext,
    tasks: AppTasks,
    principal: CurrentPrincipal,
    idempotency: CurrentIdempotency,
) -> JSONResponse:
    """A new adapter, or a new revision of one. It is checked in the background: `ready`, or
    `rejected` with the reasons. The first ready revision is promoted."""

    async def within_quota(session: WriteSession) -> None:
        await check_quota(session, principal, context.settings)

    creation = Creation(context, tasks, principal.scope, idempotency, within_quota)
    return await creation.create(request)


@router.get("")
async def list_adapters(
    context: AppContext, principal: CurrentPrincipal, page: Paging
) -> ListObject[AdapterObject]:
    async with context.database.read() as session:
        return list_object(
            await AdapterRepository(session, principal.scope).page(page), show_adapter
        )


# Names may contain slashes, so the longer paths come first.
@router.get("/{adapter:path}/revisions")
async def list_revisions(
    adapter: str, context: AppContext, principal: CurrentPrincipal, page: Paging
) -> ListObject[RevisionObject]:
    async with context.database.read() as session:
        row = await lifecycle.get_adapter(session, principal.scope, adapter)
        revisions = await AdapterRepository(session, principal.scope).revisions(row.id, page)
        return list_object(revisions, show_revision)


@router.get("/{adapter:path}/revisions/{revision}")
async def get_revision(
    adapter: str, revision: str, context: AppContext, principal: CurrentPrincipal
) -> RevisionObject:
    async with context.database.read() as session:
        row = await lifecycle.get_adapter(session, principal.scope, adapter)
        return show_revision(await lifecycle.get_revision(session, principal.scope, row, revision))


@router.get("/{adapter:path}")
async def get_adapter(
    adapter: str, context: AppContext, principal: CurrentPrincipal
) -> AdapterObject:
    async with context.database.read() as session:
        return show_adapter(await lifecycle.get_adapter(session, principal.scope, adapter))


@router.post("/{adapter:path}/promote", response_model=AdapterObject)
async def promote(
    adapter: str, wanted: Promote, principal: CurrentPrincipal, once: CurrentOnce
) -> JSONResponse:
    async def change(session: WriteSession) -> dict[str, Any]:
        revision = str(wanted.revision)
        row = await lifecycle.promote(session, principal.scope, adapter, revision)
        return show_adapter(row).model_dump()

    return await once.answer(change)


@router.post("/{adapter:path}/rollback", response_model=AdapterObject)
async def rollback(adapter: str, principal: CurrentPrincipal, once: CurrentOnce) -> JSONResponse:
    """Back to the newest ready revision before the promoted one."""

    async def change(session: WriteSession) -> dict[str, Any]:
        row = await lifecycle.roll_back(session, principal.scope, adapter)
        return show_adapter(row).model_dump()

    return await once.answer(change)


@router.delete("/{adapter:path}")
async def delete_adapter(
    adapter: str, context: AppContext, tasks: AppTasks, principal: CurrentPrincipal
) -> AdapterDeleted:
    """Its name is free again. Requests that run end; those that still wait fail with 404."""
    async with context.database.write() as session:
        row = await lifecycle.delete_adapter(session, principal.scope, adapter)
    await tasks.send(WITHDRAW, row.id)
    return AdapterDeleted(id=row.id)
