from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends
from fastapi.responses import JSONResponse

from gateway.auth.dependencies import CurrentPrincipal
from gateway.auth.idempotency import CurrentOnce, Reveal
from gateway.auth.scope import TenantScope
from gateway.kit.context import Context
from gateway.kit.database import WriteSession
from gateway.kit.dependencies import AppContext
from gateway.kit.pagination import ListObject, PageRequest, list_object, paging
from gateway.tenants.admission import CurrentAdmission
from gateway.webhooks import lifecycle
from gateway.webhooks.repository import EndpointRepository
from gateway.webhooks.sample import send_sample
from gateway.webhooks.schemas import (
    CreateEndpoint,
    EndpointDeleted,
    EndpointObject,
    EventTypeList,
    NewEndpointObject,
    RotateSecret,
    SecretObject,
    SendTest,
    SentTest,
    UpdateEndpoint,
    show_default_secret,
    show_endpoint,
)

router = APIRouter(prefix="/v1", tags=["webhooks"])

Paging = Annotated[PageRequest, Depends(paging(20, 100))]

_SECRET = "secret_id"
"""In what is stored for an Idempotency-Key, in place of the secret."""


@router.get("/webhook_event_types")
async def list_event_types(principal: CurrentPrincipal) -> EventTypeList:
    return EventTypeList()


@router.post("/webhook_endpoints", response_model=NewEndpointObject)
async def create_endpoint(
    wanted: CreateEndpoint, context: AppContext, principal: CurrentPrincipal, once: CurrentOnce
) -> JSONResponse:
    """The answer shows the signing secret, once."""

    async def create(session: WriteSession) -> dict[str, Any]:
        made = await lifecycle.create_endpoint(session, context, principal.scope, wanted)
        shown = show_endpoint(made.endpoint, made.secret.hint).model_dump()
        return {**shown, _SECRET: made.secret.id}

    return await once.answer(create, reveal=_revealing(context, principal.scope))


@router.get("/webhook_endpoints")
async def list_endpoints(
    context: AppContext, principal: CurrentPrincipal, page: Paging
) -> ListObject[EndpointObject]:
    async with context.database.read() as session:
        repository = EndpointRepository(session, principal.scope)
        found = await repository.page(page)
        hints = await repository.hints([row.id for row in found.rows])
    return list_object(found, lambda row: show_endpoint(row, hints.get(row.id)))


@router.get("/webhook_endpoints/{webhook_endpoint_id}")
async def get_endpoint(
    webhook_endpoint_id: str, context: AppContext, principal: CurrentPrincipal
) -> EndpointObject:
    async with context.database.read() as session:
        row = await lifecycle.get_endpoint(session, principal.scope, webhook_endpoint_id)
        hints = await EndpointRepository(session, principal.scope).hints([row.id])
    return show_endpoint(row, hints.get(row.id))


@router.post("/webhook_endpoints/{webhook_endpoint_id}", response_model=EndpointObject)
@router.patch("/webhook_endpoints/{webhook_endpoint_id}", response_model=EndpointObject)
async def update_endpoint(
    webhook_endpoint_id: str,
    wanted: UpdateEndpoint,
    context: AppContext,
    principal: CurrentPrincipal,
    once: CurrentOnce,
) -> JSONResponse:
    scope = principal.scope

    async def update(session: WriteSession) -> dict[str, Any]:
        row = await lifecycle.update_endpoint(session, context, scope, webhook_endpoint_id, wanted)
        hints = await EndpointRepository(session, scope).hints([row.id])
        return show_endpoint(row, hints.get(row.id)).model_dump()

    return await once.answer(update)


@router.delete("/webhook_endpoints/{webhook_endpoint_id}")
async def delete_endpoint(
    webhook_endpoint_id: str, context: AppContext, principal: CurrentPrincipal
) -> EndpointDeleted:
    """Nothing is sent there any more; what was pending has failed."""
    async with context.database.write() as session:
        await lifecycle.delete_endpoint(session, principal.scope, webhook_endpoint_id)
    return EndpointDeleted(id=webhook_endpoint_id)


@router.post(
    "/webhook_endpoints/{webhook_endpoint_id}/rotate_secret",
    response_model=NewEndpointObject | SecretObject,
)
@router.post(
    "/webhook_endpoints/{webhook_endpoint_id}/rotate-secret",
    response_model=NewEndpointObject | SecretObject,
    include_in_schema=False,
)
async def rotate_secret(
    webhook_endpoint_id: str,
    context: AppContext,
    principal: CurrentPrincipal,
    once: CurrentOnce,
    wanted: Annotated[RotateSecret, Body(default_factory=RotateSecret)],
) -> JSONResponse:
    """A new signing secret, shown once; the old one signs too for a while. The id `default` is
    the tenant's default secret, which signs for URLs that jobs name."""
    scope = principal.scope

    async def create(session: WriteSession) -> dict[str, Any]:
        if webhook_endpoint_id == lifecycle.DEFAULT:
            secret = await lifecycle.rotate_secret(session, context, scope, None, wanted.overlap)
            shown: SecretObject | EndpointObject = show_default_secret(secret)
        else:
            row = await lifecycle.get_endpoint(session, scope, webhook_endpoint_id)
            secret = await lifecycle.rotate_secret(session, context, scope, row.id, wanted.overlap)
            shown = show_endpoint(row, secret.hint)
        return {**shown.model_dump(), _SECRET: secret.id}

    return await once.answer(create, reveal=_revealing(context, scope))


@router.post("/webhook_endpoints/{webhook_endpoint_id}/test")
async def test_endpoint(
    webhook_endpoint_id: str,
    context: AppContext,
    principal: CurrentPrincipal,
    admission: CurrentAdmission,
    wanted: Annotated[SendTest, Body(default_factory=SendTest)],
) -> SentTest:
    """Sends a sample event now, and answers with the receiver's status."""
    await admission.admit(tokens=0)
    status = await send_sample(context, principal.scope, webhook_endpoint_id, wanted.event_type)
    return SentTest(
        webhook_endpoint_id=webhook_endpoint_id,
        event_type=wanted.event_type,
        status_code=status,
    )


def _revealing(context: Context, scope: TenantScope) -> Reveal:
    """Answers with a secret that is stored nowhere, not even for an Idempotency-Key."""

    async def reveal(session: WriteSession, kept: dict[str, Any]) -> dict[str, Any]:
        secret = await lifecycle.secret_text(session, context, scope, kept.pop(_SECRET))
        return {**kept, "signing_secret": secret}

    return reveal
