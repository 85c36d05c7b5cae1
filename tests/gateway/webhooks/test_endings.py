"""Every way in which a job or a batch ends tells of it, once."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from sqlalchemy import select, update

from gateway.batches.finaliser import finalize_batch
from gateway.jobs.service import expire_jobs
from gateway.kit.database import Database
from gateway.models import Batch, Request, WebhookEvent

COMPLETION = "/v1/completions"
BODY = {"model": "tiny", "prompt": "Hi", "max_tokens": 4}


async def told(database: Database, tenant: Any) -> list[tuple[str, str]]:
    """(type, id of the object), in order."""
    async with database.read() as session:
        rows = await session.scalars(select(WebhookEvent).order_by(WebhookEvent.id))
        events = list(rows)
    assert {event.tenant_id for event in events} <= {tenant.tenant_id}
    return [(event.type, json.loads(event.body)["data"]["id"]) for event in events]


async def submit(client: httpx.AsyncClient) -> str:
    answer = await client.post("/v1/jobs", json={"endpoint": COMPLETION, "body": BODY})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


async def create(client: httpx.AsyncClient, *bodies: dict[str, Any]) -> str:
    requests = [{"custom_id": f"r-{n}", "body": body} for n, body in enumerate(bodies)]
    wanted = {"endpoint": COMPLETION, "completion_window": "24h", "requests": requests}
    answer = await client.post("/v1/batches", json=wanted)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def test_jobs_that_workers_end(
    client: httpx.AsyncClient, deployment: Any, database: Database, tenant: Any
) -> None:
    good, bad, stopped = [await submit(client) for _ in range(3)]
    leases = {lease.request.request_id: lease for lease in await deployment.claim()}
    await deployment.answer(leases[good])
    await deployment.fail(leases[bad], "engine_error")
    async with database.write() as session:
        await session.execute(
            update(Request).where(Request.id == stopped).values(cancel_requested_at=1)
        )
    await deployment.fail(leases[stopped], "engine_error")
    await deployment.collect()
    expected = [("job.completed", good), ("job.failed", bad), ("job.cancelled", stopped)]
    assert sorted(await told(database, tenant)) == sorted(expected)


async def test_jobs_that_end_without_a_worker(
    client: httpx.AsyncClient, deployment: Any, database: Database, tenant: Any
) -> None:
    cancelled, expired = await submit(client), await submit(client)
    for _ in range(2):
        assert (await client.post(f"/v1/jobs/{cancelled}/cancel")).status_code == 200
    async with database.write() as session:
        await session.execute(update(Request).where(Request.id == expired).values(deadline_at=1))
    await expire_jobs(deployment.context)
    await expire_jobs(deployment.context)
    expected = [("job.cancelled", cancelled), ("job.failed", expired)]
    assert await told(database, tenant) == expected
    for lease in await deployment.claim():  # too late
        await deployment.answer(lease)
    await deployment.collect()
    assert await told(database, tenant) == expected


async def test_a_job_that_no_longer_fits_at_dispatch(
    client: httpx.AsyncClient, deployment: Any, database: Database, tenant: Any
) -> None:
    job = await submit(client)
    changed = {"state": "queued", "body": {**BODY, "prompt": 7}}
    async with database.write() as session:
        await session.execute(update(Request).values(**changed))
    await deployment.dispatch()
    assert await told(database, tenant) == [("job.failed", job)]


async def test_calls_and_lines_tell_nothing_of_themselves(
    client: httpx.AsyncClient, deployment: Any, database: Database, tenant: Any
) -> None:
    batch = await create(client, BODY, BODY)
    await deployment.finish_all()
    await finalize_batch(deployment.context, batch)
    assert await told(database, tenant) == [("batch.completed", batch)]


async def test_a_batch_that_fails(
    client: httpx.AsyncClient, deployment: Any, database: Database, tenant: Any
) -> None:
    batch = await create(client, BODY, {**BODY, "model": "unknown"})
    await deployment.finish_all()
    assert await told(database, tenant) == [("batch.failed", batch)]


@pytest.mark.parametrize("window", ["before validation", "running"])
async def test_a_batch_that_is_cancelled(
    client: httpx.AsyncClient, deployment: Any, database: Database, tenant: Any, window: str
) -> None:
    batch = await create(client, BODY)
    if window == "running":
        await deployment.control()
    assert (await client.post(f"/v1/batches/{batch}/cancel")).status_code == 200
    assert await told(database, tenant) == []
    await deployment.control()
    await finalize_batch(deployment.context, batch, grace_ms=0)
    assert await told(database, tenant) == [("batch.cancelled", batch)]


async def test_a_batch_that_expires(
    client: httpx.AsyncClient, deployment: Any, database: Database, tenant: Any
) -> None:
    batch = await create(client, BODY)
    await deployment.control()
    async with database.write() as session:
        await session.execute(update(Batch).values(expires_at=1000))
    await finalize_batch(deployment.context, batch)
    await finalize_batch(deployment.context, batch)
    assert await told(database, tenant) == [("batch.expired", batch)]
