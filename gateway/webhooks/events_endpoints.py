from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends
from fastapi.responses import JSONResponse

from gateway.auth.dependencies import CurrentPrincipal
from gateway.auth.idempotency import CurrentOnce
from gateway.kit.database import WriteSession
from gateway.kit.dependencies import AppContext, AppTasks
from gateway.kit.pagination import ListObject, Page, PageRequest, list_object, paging
from gateway.kit.task_names import DELIVER
from gateway.models import WebhookDelivery
from gateway.webhooks import service
from gateway.webhooks.events import EventType
from gateway.webhooks.repository import EventRepository
from gateway.webhooks.schemas import (
    DeliveryObject,
    EventObject,
    Redeliver,
    show_delivery,
    show_event,
)

router = APIRouter(prefix="/v1/webhook_events", tags=["webhooks"])

Paging = Annotated[PageRequest, Depends(paging(20, 100))]


@router.get("")
async def list_events(
    context: AppContext, principal: CurrentPrincipal, page: Paging, type: EventType | None = None
) -> ListObject[EventObject]:
    async with context.database.read() as session:
        found = await EventRepository(session, principal.scope).page(page, type)
    return list_object(found, show_event)


@router.get("/{webhook_event_id}")
async def get_event(
    webhook_event_id: str, context: AppContext, principal: CurrentPrincipal
) -> EventObject:
    async with context.database.read() as session:
        return show_event(await service.get_event(session, principal.scope, webhook_event_id))


@router.get("/{webhook_event_id}/deliveries")
async def list_deliveries(
    webhook_event_id: str, context: AppContext, principal: CurrentPrincipal, page: Paging
) -> ListObject[DeliveryObject]:
    """Where the event was sent, and what became of each attempt."""
    async with context.database.read() as session:
        event = await service.get_event(session, principal.scope, webhook_event_id)
        repository = EventRepository(session, principal.scope)
        return await _shown(repository, await repository.deliveries(event.id, page))


@router.post("/{webhook_event_id}/redeliver", response_model=ListObject[DeliveryObject])
async def redeliver(
    webhook_event_id: str,
    tasks: AppTasks,
    principal: CurrentPrincipal,
    once: CurrentOnce,
    wanted: Annotated[Redeliver, Body(default_factory=Redeliver)],
) -> JSONResponse:
    """Send the event again, with the same `webhook-id` and the same bytes."""
    scope = principal.scope

    async def again(session: WriteSession) -> dict[str, Any]:
        rows = await service.redeliver(session, scope, webhook_event_id, wanted.webhook_endpoint_id)
        repository = EventRepository(session, scope)
        return (await _shown(repository, Page(rows, has_more=False))).model_dump()

    response = await once.answer(again)
    await tasks.send(DELIVER)
    return response


async def _shown(
    repository: EventRepository, found: Page[WebhookDelivery]
) -> ListObject[DeliveryObject]:
    attempts = await repository.attempts([row.id for row in found.rows])
    urls = await repository.urls([row.endpoint_id for row in found.rows])
    return list_object(
        found, lambda row: show_delivery(row, urls[row.endpoint_id], attempts[row.id])
    )
