"""Events are recorded with the change they tell of, and reach who wants them."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import select

from gateway.kit.clock import now_ms
from gateway.kit.database import Database
from gateway.kit.ids import new_id
from gateway.models import WebhookDelivery, WebhookEndpoint, WebhookEvent
from gateway.webhooks import service
from gateway.webhooks.events import NewEvent, Target


async def add_endpoint(database: Database, tenant_id: str, **values: Any) -> str:
    now = now_ms()
    given = {"url": "https://example.com/hook", "created_at": now, "updated_at": now, **values}
    endpoint_id = new_id("we")
    async with database.write() as session:
        session.add(WebhookEndpoint(id=endpoint_id, tenant_id=tenant_id, **given))
    return endpoint_id


async def delivered_to(database: Database) -> set[str]:
    async with database.read() as session:
        return set(await session.scalars(select(WebhookDelivery.endpoint_id)))


async def test_an_event_has_openais_thin_body(database: Database, tenant: Any) -> None:
    async with database.write() as session:
        await service.record(session, tenant.tenant_id, "invoice.finalized", {"id": "invoice_1"})
        assert not service.has_deliveries(session)
    async with database.read() as session:
        event = (await session.scalars(select(WebhookEvent))).one()
    assert json.loads(event.body) == {
        "id": event.id,
        "object": "event",
        "type": "invoice.finalized",
        "created_at": event.created_at // 1000,
        "data": {"id": "invoice_1"},
    }
    assert "." not in event.id


async def test_an_event_goes_with_its_transaction(database: Database, tenant: Any) -> None:
    await add_endpoint(database, tenant.tenant_id)
    try:
        async with database.write() as session:
            await service.record(session, tenant.tenant_id, "batch.failed", {"id": "batch_1"})
            raise RuntimeError
    except RuntimeError:
        pass
    async with database.read() as session:
        assert await session.scalar(select(WebhookEvent.id)) is None
    assert await delivered_to(database) == set()


async def test_filters_choose_the_endpoints(
    database: Database, tenant: Any, other_tenant: Any
) -> None:
    mine = tenant.tenant_id
    every = await add_endpoint(database, mine)
    batches = await add_endpoint(database, mine, event_types=["batch.failed", "job.failed"])
    await add_endpoint(database, mine, event_types=["job.completed"])
    await add_endpoint(database, mine, deleted_at=1)
    await add_endpoint(database, mine, disabled_at=1)
    await add_endpoint(database, mine, kind="origin")
    await add_endpoint(database, other_tenant.tenant_id)
    async with database.write() as session:
        await service.record(session, mine, "batch.failed", {"id": "batch_1"})
        assert service.has_deliveries(session)
    assert await delivered_to(database) == {every, batches}


async def test_a_named_endpoint_is_told_once(
    database: Database, tenant: Any, other_tenant: Any
) -> None:
    filtered = await add_endpoint(database, tenant.tenant_id, event_types=["batch.failed"])
    origin = await add_endpoint(database, tenant.tenant_id, kind="origin")
    theirs = await add_endpoint(database, other_tenant.tenant_id)
    url = "https://example.com/jobs/1"
    events = [
        NewEvent(tenant.tenant_id, "job.completed", {"id": "job_1"}, Target(filtered)),
        NewEvent(tenant.tenant_id, "batch.failed", {"id": "batch_1"}, Target(filtered)),
        NewEvent(tenant.tenant_id, "job.completed", {"id": "job_2"}, Target(origin, url)),
        NewEvent(tenant.tenant_id, "job.completed", {"id": "job_3"}, Target(theirs)),
    ]
    async with database.write() as session:
        await service.record_all(session, events)
    async with database.read() as session:
        rows = await session.execute(select(WebhookDelivery.endpoint_id, WebhookDelivery.url))
        found = sorted((row[0], row[1]) for row in rows)
    assert found == sorted([(filtered, None), (filtered, None), (origin, url)])
