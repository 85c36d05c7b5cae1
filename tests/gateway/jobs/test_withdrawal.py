"""An adapter goes: what waits for it fails with 404, what runs ends, all else is untouched."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from sqlalchemy import select

from gateway.batches.finaliser import finalize_batch
from gateway.collector.upkeep import requeue_unknown
from gateway.jobs.withdrawal import withdraw
from gateway.kit.clock import now_ms
from gateway.models import Adapter, AdapterGrant, AdapterRevision, Request, UsageRecord
from worker.protocol.types import Capacity, RequestId, WorkerLimits
from worker.queue.base import WorkerInfo

CHAT = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "Hi"}]
AddAdapter = Callable[..., Awaitable[str]]


@pytest.fixture
def add_adapter(deployment: Any) -> AddAdapter:
    """Adapter `name` with `revisions` ready ones, the first promoted: a tenant's or shared."""

    async def add(name: str = "bot", owner: Any = None, revisions: int = 1) -> str:
        async with deployment.context.database.write() as session:
            adapter = Adapter(
                id=f"adapter_{name}",
                tenant_id=owner and owner.tenant_id,
                name=name,
                base_model="tiny",
                promoted_revision_id=f"adrev_{name}_1",
                created_at=now_ms(),
            )
            session.add(adapter)
            await session.flush()
            for number in range(1, revisions + 1):
                revision = AdapterRevision(
                    id=f"adrev_{name}_{number}",
                    adapter_id=adapter.id,
                    tenant_id=adapter.tenant_id,
                    number=number,
                    status="ready",
                    digest=f"{number}" * 64,
                    rank=number,
                    bytes=1,
                    upload_key="uploads/none",
                    created_at=now_ms(),
                )
                session.add(revision)
        return adapter.id

    return add


async def submit(client: httpx.AsyncClient, model: str = "bot") -> str:
    body = {"model": model, "messages": MESSAGES, "max_tokens": 5}
    answer = await client.post("/v1/jobs", json={"endpoint": CHAT, "body": body})
    assert answer.status_code == 202, answer.text
    job_id: str = answer.json()["id"]
    return job_id


async def delete(client: httpx.AsyncClient, deployment: Any, name: str = "bot") -> None:
    assert (await client.delete(f"/v1/adapters/{name}")).status_code == 200
    await deployment.control()


def is_gone(job: dict[str, Any], model: str = "bot") -> bool:
    response = job["response"]
    error = response["body"]["error"]
    assert f"The model '{model}' does not exist" in error["message"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    return (job["status"], response["status_code"]) == ("failed", 404)


async def shown(client: httpx.AsyncClient, job_id: str) -> dict[str, Any]:
    job: dict[str, Any] = (await client.get(f"/v1/jobs/{job_id}")).json()
    return job


async def test_a_job_runs_with_the_revision_of_its_submission(
    client: httpx.AsyncClient, tenant: Any, deployment: Any, add_adapter: AddAdapter
) -> None:
    await add_adapter(owner=tenant, revisions=2)
    await submit(client)
    await client.post("/v1/adapters/bot/promote", json={"revision": 2})
    await submit(client)
    await submit(client, "bot@1")
    refs = [lease.request.adapter for lease in await deployment.claim()]
    assert sorted((ref.digest[0], ref.rank) for ref in refs) == [("1", 1), ("1", 1), ("2", 2)]


async def test_what_waits_in_the_queue_is_taken_out(
    client: httpx.AsyncClient, tenant: Any, deployment: Any, add_adapter: AddAdapter
) -> None:
    await add_adapter(owner=tenant)
    job, other = await submit(client), await submit(client, "tiny")
    assert (await deployment.queue.depth())["standard"].ready == 2
    await delete(client, deployment)
    assert is_gone(await shown(client, job))
    [lease] = await deployment.claim()
    assert lease.request.request_id == other
    assert await deployment.answer(lease)
    await deployment.collect()
    assert (await shown(client, other))["status"] == "completed"
    async with deployment.context.database.read() as session:
        assert [row.model for row in await session.scalars(select(UsageRecord))] == ["tiny"]
    body = {"model": "bot", "messages": MESSAGES}
    again = await client.post("/v1/jobs", json={"endpoint": CHAT, "body": body})
    assert (again.status_code, again.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("told", [True, False])
async def test_what_runs_ends_and_is_billed(
    client: httpx.AsyncClient, tenant: Any, deployment: Any, add_adapter: AddAdapter, told: bool
) -> None:
    """Also when SQL has not yet heard that it runs."""
    await add_adapter(owner=tenant)
    job = await submit(client)
    [lease] = await deployment.claim()
    if told:
        await deployment.started(lease)
    await delete(client, deployment)
    assert await deployment.answer(lease, "done")
    await deployment.collect()
    done = await shown(client, job)
    assert done["response"]["body"]["choices"][0]["message"]["content"] == "done"
    assert done["response"]["body"]["model"] == "bot"


async def test_what_waits_in_sql_fails_whether_or_not_a_message_comes(
    client: httpx.AsyncClient, tenant: Any, deployment: Any, add_adapter: AddAdapter
) -> None:
    await add_adapter(owner=tenant)
    jobs = [await submit(client) for _ in range(3)]
    await requeued(deployment, jobs)
    assert (await client.delete("/v1/adapters/bot")).status_code == 200
    assert deployment.tasks.sent.pop() == ("adapters.withdraw", "adapter_bot")
    assert await deployment.dispatch() == 0
    assert [is_gone(await shown(client, job)) for job in jobs] == [True] * 3


async def test_a_task_ends_what_waits_in_sql_at_once(
    client: httpx.AsyncClient, tenant: Any, deployment: Any, add_adapter: AddAdapter
) -> None:
    await add_adapter(owner=tenant)
    job, other = await submit(client), await submit(client, "tiny")
    await requeued(deployment, [job, other])
    await delete(client, deployment)
    assert is_gone(await shown(client, job))
    assert (await shown(client, other))["status"] == "queued"
    assert await withdraw(deployment.context, "adapter_bot") == 0


async def test_a_crash_between_queue_and_sql_loses_nothing(
    client: httpx.AsyncClient, tenant: Any, deployment: Any, add_adapter: AddAdapter
) -> None:
    await add_adapter(owner=tenant)
    job = await submit(client)
    await client.delete("/v1/adapters/bot")
    assert await deployment.queue.withdraw([RequestId(job)]) == [job]
    assert await requeue_unknown(deployment.context, "tiny", grace_ms=-1000) == 1
    assert await deployment.dispatch() == 0
    assert is_gone(await shown(client, job))


async def test_lines_of_a_batch_have_their_answer_in_the_error_file(
    client: httpx.AsyncClient,
    openai_client: AsyncOpenAI,
    tenant: Any,
    deployment: Any,
    add_adapter: AddAdapter,
) -> None:
    await add_adapter(owner=tenant)
    lines = [
        {"custom_id": str(n), "method": "POST", "url": CHAT}
        | {"body": {"model": model, "messages": MESSAGES, "max_tokens": 4}}
        for n, model in enumerate(["bot", "tiny", "bot", "bot"])
    ]
    content = b"\n".join(json.dumps(line).encode() for line in lines)
    file = await openai_client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = await openai_client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h"
    )
    await deployment.control()  # validated: lines wait in SQL
    await deployment.dispatch()
    by_line = {lease.request.request_id: lease for lease in await deployment.claim(requests=1)}
    await delete(client, deployment)
    for lease in by_line.values():
        await deployment.answer(lease)
    await deployment.collect()
    await deployment.finish_all()
    await finalize_batch(deployment.context, batch.id)
    batch = await openai_client.batches.retrieve(batch.id)
    assert batch.status == "completed"
    output = await lines_of(openai_client, batch.output_file_id)
    errors = await lines_of(openai_client, batch.error_file_id)
    assert len(output) + len(errors) == 4
    assert "1" in {line["custom_id"] for line in output}
    for line in errors:
        assert line["response"]["status_code"] == 404
        assert line["response"]["body"]["error"]["code"] == "model_not_found"
    assert len(errors) >= 2
    assert (batch.request_counts.completed, batch.request_counts.failed) == (
        len(output),
        len(errors),
    )


async def test_a_batch_in_validation_learns_of_it_when_its_lines_come_up(
    client: httpx.AsyncClient,
    openai_client: AsyncOpenAI,
    tenant: Any,
    deployment: Any,
    add_adapter: AddAdapter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its lines are held, with their revision pinned, while the adapter goes."""
    await add_adapter(owner=tenant)
    line = {"custom_id": "a", "method": "POST", "url": CHAT}
    line |= {"body": {"model": "bot", "messages": MESSAGES}}  # type: ignore[dict-item]
    content = json.dumps(line).encode()
    file = await openai_client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = await openai_client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h"
    )
    from gateway.batches import validation

    conclude = validation.conclude

    async def delayed(context: Any, batch_id: str) -> bool:
        await client.delete("/v1/adapters/bot")
        await withdraw(context, "adapter_bot")
        return await conclude(context, batch_id)

    monkeypatch.setattr(validation, "conclude", delayed)
    await validation.validate_batch(deployment.context, deployment.tasks, batch.id)
    assert await deployment.dispatch() == 0
    await finalize_batch(deployment.context, batch.id)
    batch = await openai_client.batches.retrieve(batch.id)
    assert (batch.status, batch.request_counts.failed) == ("completed", 1)
    [failed] = await lines_of(openai_client, batch.error_file_id)
    assert failed["response"]["status_code"] == 404


@pytest.mark.parametrize("stream", [False, True])
async def test_a_synchronous_call_that_waits_answers_404(
    client: httpx.AsyncClient,
    openai_client: AsyncOpenAI,
    tenant: Any,
    deployment: Any,
    add_adapter: AddAdapter,
    stream: bool,
) -> None:
    await add_adapter(owner=tenant)
    limits = WorkerLimits(context_tokens=1024, kv_tokens=100_000, adapter_rank=64)
    free = Capacity(kv_tokens=1, adapter_rank=1, requests=1)
    await deployment.context.queues.directory.announce(WorkerInfo("w", "tiny", limits, free))
    call = asyncio.create_task(
        openai_client.chat.completions.create(
            model="bot", messages=MESSAGES, max_tokens=5, stream=stream
        )
    )
    async with asyncio.timeout(10):
        while not (await deployment.queue.depth())["interactive"].ready:  # noqa: ASYNC110
            await asyncio.sleep(0)
    await delete(client, deployment)
    with pytest.raises(openai.NotFoundError) as error:
        await asyncio.wait_for(call, 10)
    assert error.value.code == "model_not_found"


async def test_a_revoked_grant_ends_that_tenants_requests_alone(
    admin: httpx.AsyncClient,
    client: httpx.AsyncClient,
    other_client: httpx.AsyncClient,
    tenant: Any,
    other_tenant: Any,
    deployment: Any,
    add_adapter: AddAdapter,
) -> None:
    adapter_id = await add_adapter("house")
    async with deployment.context.database.write() as session:
        for number, owner in enumerate((tenant, other_tenant)):
            session.add(
                AdapterGrant(
                    id=f"grant_{number}",
                    adapter_id=adapter_id,
                    tenant_id=owner.tenant_id,
                    created_at=now_ms(),
                )
            )
    mine, theirs = await submit(client, "house"), await submit(other_client, "house")
    await admin.delete(f"/v1/admin/adapters/house/grants/{tenant.tenant_id}")
    await deployment.control()
    assert is_gone(await shown(client, mine), "house")
    [lease] = await deployment.claim()
    assert await deployment.answer(lease)
    await deployment.collect()
    assert (await shown(other_client, theirs))["status"] == "completed"
    async with deployment.context.database.read() as session:
        [usage] = await session.scalars(select(UsageRecord))
    assert (usage.tenant_id, usage.model) == (other_tenant.tenant_id, "house")


async def requeued(deployment: Any, ids: list[str]) -> None:
    """Out of the queue and waiting in SQL, as behind a full window."""
    await deployment.queue.withdraw([RequestId(each) for each in ids])
    async with deployment.context.database.write() as session:
        for row in await session.scalars(select(Request).where(Request.id.in_(ids))):
            row.state = "queued"


async def lines_of(client: AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    content = await client.files.content(file_id)
    return [json.loads(each) for each in content.text.splitlines() if each]
