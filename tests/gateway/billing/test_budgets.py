"""Budgets: never over the hard one, whatever happens at once; what ends gives back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from sqlalchemy import event, select, update

from gateway.batches.finaliser import finalize_batch
from gateway.billing.audit import audit
from gateway.billing.service import most_nano
from gateway.jobs.service import expire_jobs
from gateway.kit.clock import now_ms
from gateway.kit.months import end_of, month_of, months_later, start_of
from gateway.models import Account, Batch, Price, Request, WebhookEvent
from worker.protocol.types import Capacity, WorkerLimits
from worker.queue.base import WorkerInfo

BODY = {"model": "tiny", "prompt": "Hi", "max_tokens": 8}
JOB = {"endpoint": "/v1/completions", "body": BODY}
MOST = 2 * 100 + 8 * 400  # nanodollars, of BODY
USED = 2 * 100 + 5 * 400  # the answer is "hello"


async def budget(admin: httpx.AsyncClient, tenant: Any, **wanted: Any) -> None:
    answer = await admin.post("/v1/admin/budgets", json={"tenant": tenant.tenant_id, **wanted})
    assert answer.status_code == 200, answer.text


async def standing(client: httpx.AsyncClient) -> tuple[int, int]:
    """Spent and reserved."""
    shown = (await client.get("/v1/budget")).json()
    return shown["spent_nano"], shown["reserved_nano"]


async def submit(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/v1/jobs", json={**JOB, "body": {**BODY, **body}})


async def create_batch(client: AsyncOpenAI, lines: int, **batch: Any) -> Any:
    content = b"\n".join(
        json.dumps(
            {"custom_id": f"{n}", "method": "POST", "url": "/v1/completions", "body": BODY}
        ).encode()
        for n in range(lines)
    )
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", **batch
    )


async def balanced(deployment: Any) -> bool:
    found = await audit(deployment.context.database, deployment.context.store)
    return [str(violation) for violation in found] == []


async def events(deployment: Any) -> list[str]:
    async with deployment.context.database.read() as session:
        rows = select(WebhookEvent.type).where(WebhookEvent.type.like("budget.%"))
        return list(await session.scalars(rows))


def test_months_turn_in_utc() -> None:
    assert month_of(0) == "1970-01"
    assert month_of(start_of("2026-11") - 1) == "2026-10"
    assert month_of(end_of("2026-12")) == "2027-01" == months_later("2026-12", 1)
    assert months_later("2026-01", -1) == "2025-12"


def test_the_most_it_can_cost_whatever_is_cached() -> None:
    price = Price(input_nano=1, cached_nano=5, output_nano=10, batch_percent=50)
    assert most_nano(price, "standard", 3, 2) == 3 * 5 + 2 * 10
    assert most_nano(price, "batch", 3, 2) == 18


async def test_operators_set_budgets(
    admin: httpx.AsyncClient, client: httpx.AsyncClient, tenant: Any, deployment: Any
) -> None:
    shown = (await client.get("/v1/budget")).json()
    assert (shown["hard"], shown["left"], shown["spent"]) == (None, None, "0.000000000")
    await budget(admin, tenant, hard_nano=10**9)
    assert (await client.get("/v1/budget")).json()["left"] == "1.000000000"
    await budget(admin, tenant, month=month_of(now_ms()), soft_nano=5)
    shown = (await client.get("/v1/budget")).json()
    assert (shown["soft_nano"], shown["hard"]) == (5, None)  # the month's own goes first
    listed = await admin.get("/v1/admin/budgets", params={"tenant": tenant.tenant_id})
    assert [row["month"] for row in listed.json()["data"]] == [None, month_of(now_ms())]
    for wrong in ({"month": "2026-13"}, {"hard_nano": -1}):
        answer = await admin.post("/v1/admin/budgets", json={"tenant": tenant.tenant_id, **wrong})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(wrong)))
    assert (await client.get("/v1/admin/budgets")).status_code == 403


async def test_a_job_reserves_and_settles(client: httpx.AsyncClient, deployment: Any) -> None:
    assert (await submit(client)).status_code == 202
    assert await standing(client) == (0, MOST)
    assert await balanced(deployment)
    await deployment.work()
    assert await standing(client) == (USED, 0)
    assert await balanced(deployment)


async def _cancel(client: httpx.AsyncClient, deployment: Any, job: str) -> None:
    assert (await client.post(f"/v1/jobs/{job}/cancel")).status_code == 200


async def _expire(client: httpx.AsyncClient, deployment: Any, job: str) -> None:
    async with deployment.context.database.write() as session:
        await session.execute(update(Request).values(deadline_at=1))
    assert await expire_jobs(deployment.context) == 1


async def _fail(client: httpx.AsyncClient, deployment: Any, job: str) -> None:
    [lease] = await deployment.claim()
    await deployment.fail(lease, "engine_error")
    await deployment.collect()


async def _crash(client: httpx.AsyncClient, deployment: Any, job: str) -> None:
    """Ends though the model's files have changed: what was accepted is refused at dispatch."""
    async with deployment.context.database.write() as session:
        await session.execute(update(Request).values(state="queued", body={"model": "tiny"}))
    await deployment.dispatch()


@pytest.mark.parametrize("end", [_cancel, _expire, _fail, _crash])
async def test_every_end_of_a_job_gives_back(
    client: httpx.AsyncClient,
    deployment: Any,
    end: Callable[[httpx.AsyncClient, Any, str], Awaitable[None]],
) -> None:
    job = (await submit(client)).json()["id"]
    await end(client, deployment, job)
    assert (await client.get(f"/v1/jobs/{job}")).json()["status"] not in {"queued", "running"}
    assert await standing(client) == (0, 0)
    assert await balanced(deployment)


async def test_the_hard_budget_refuses_jobs_and_calls(
    admin: httpx.AsyncClient,
    client: httpx.AsyncClient,
    openai_client: AsyncOpenAI,
    other_client: httpx.AsyncClient,
    tenant: Any,
    deployment: Any,
) -> None:
    await budget(admin, tenant, hard_nano=MOST)
    assert (await submit(client, max_tokens=9)).status_code == 429
    key = {"Idempotency-Key": "k"}
    assert (await client.post("/v1/jobs", json=JOB, headers=key)).status_code == 202
    refused = await submit(client)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "budget_exceeded")
    assert "$0.000003400 are reserved" in refused.json()["error"]["message"]
    assert (await client.post("/v1/jobs", json=JOB, headers=key)).status_code == 202  # again
    roomy = WorkerLimits(context_tokens=1024, kv_tokens=100_000, adapter_rank=64)
    info = WorkerInfo("w", "tiny", roomy, Capacity(kv_tokens=1, adapter_rank=1, requests=1))
    await deployment.context.queues.directory.announce(info)
    retrying = openai_client.with_options(max_retries=5)
    with pytest.raises(openai.RateLimitError) as caught:
        await retrying.completions.create(**BODY)
    assert caught.value.code == "budget_exceeded"
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert caught.value.response.request.headers["x-stainless-retry-count"] == "0"
    assert (await submit(other_client)).status_code == 202
    await deployment.work()
    assert await standing(client) == (USED, 0)
    assert (await submit(client)).status_code == 429  # what was used counts
    await budget(admin, tenant, hard_nano=USED + MOST)
    assert (await submit(client)).status_code == 202
    assert await balanced(deployment)


async def test_never_over_the_hard_budget_at_once(
    admin: httpx.AsyncClient, client: httpx.AsyncClient, tenant: Any, deployment: Any
) -> None:
    hard = 7 * MOST + MOST // 2
    await budget(admin, tenant, hard_nano=hard)
    waves = 0
    while (await standing(client))[0] + MOST <= hard:
        answers = await asyncio.gather(
            *(submit(client) for _ in range(12)), deployment.work(), return_exceptions=False
        )
        codes = {a.status_code for a in answers if isinstance(a, httpx.Response)}
        assert codes <= {202, 429}
        spent, reserved = await standing(client)
        assert spent + reserved <= hard
        await deployment.work()
        waves += 1
    assert waves > 1  # what was reserved and not used can be spent
    spent, reserved = await standing(client)
    assert reserved == 0
    assert hard - MOST < spent <= hard
    assert await balanced(deployment)


async def test_a_batch_reserves_as_a_whole(
    admin: httpx.AsyncClient,
    client: httpx.AsyncClient,
    openai_client: AsyncOpenAI,
    tenant: Any,
    deployment: Any,
) -> None:
    await budget(admin, tenant, hard_nano=3 * MOST // 2)
    batch = await create_batch(openai_client, 4)
    await deployment.control()
    failed = await openai_client.batches.retrieve(batch.id)
    assert failed.status == "failed"
    assert [error.code for error in failed.errors.data] == ["budget_exceeded"]
    assert await standing(client) == (0, 0)
    batch = await create_batch(openai_client, 3)
    await deployment.control()
    assert await standing(client) == (0, 3 * MOST // 2)
    await deployment.finish_all()
    assert (await openai_client.batches.retrieve(batch.id)).status == "completed"
    assert await standing(client) == (3 * USED // 2, 0)
    assert await balanced(deployment)


@pytest.mark.parametrize("ending", ["cancelled", "expired"])
async def test_what_a_batch_leaves_unfinished_is_given_back(
    client: httpx.AsyncClient, openai_client: AsyncOpenAI, deployment: Any, ending: str
) -> None:
    batch = await create_batch(openai_client, 3)
    await deployment.control()
    await deployment.dispatch()
    [lease] = await deployment.claim(1)
    await deployment.answer(lease)
    await deployment.collect()
    assert await standing(client) == (USED // 2, MOST)
    if ending == "expired":
        async with deployment.context.database.write() as session:
            await session.execute(update(Batch).values(expires_at=1))
        await finalize_batch(deployment.context, batch.id)
    else:
        await openai_client.batches.cancel(batch.id)
        await finalize_batch(deployment.context, batch.id, grace_ms=0)
    assert (await openai_client.batches.retrieve(batch.id)).status == ending
    assert await standing(client) == (USED // 2, 0)
    assert await balanced(deployment)


async def test_a_batch_cancelled_before_it_ran_held_nothing(
    client: httpx.AsyncClient, openai_client: AsyncOpenAI, deployment: Any
) -> None:
    batch = await create_batch(openai_client, 3)
    await openai_client.batches.cancel(batch.id)
    await finalize_batch(deployment.context, batch.id)
    assert await standing(client) == (0, 0)
    assert await balanced(deployment)


async def test_a_soft_budget_is_told_of_once(
    admin: httpx.AsyncClient, client: httpx.AsyncClient, tenant: Any, deployment: Any
) -> None:
    await budget(admin, tenant, soft_nano=USED + 1)
    for expected in ([], ["budget.threshold_reached"], ["budget.threshold_reached"]):
        assert (await submit(client)).status_code == 202
        await deployment.work()
        assert await events(deployment) == expected
    await budget(admin, tenant, soft_nano=1)  # reached already
    assert len(await events(deployment)) == 2


async def test_a_new_month_begins_at_nothing(
    admin: httpx.AsyncClient, client: httpx.AsyncClient, tenant: Any, deployment: Any
) -> None:
    await budget(admin, tenant, hard_nano=MOST)
    async with deployment.context.database.write() as session:
        last_month = months_later(month_of(now_ms()), -1)
        await session.execute(update(Account).values(month=last_month, spent_nano=10**12))
    assert await standing(client) == (0, 0)
    assert (await submit(client)).status_code == 202
    await deployment.work()
    assert await standing(client) == (USED, 0)
    assert await balanced(deployment)


async def test_a_fold_changes_each_account_once(
    client: httpx.AsyncClient, other_client: httpx.AsyncClient, deployment: Any
) -> None:
    """However many requests it ends: one statement locks the accounts, in order, one changes
    them."""
    for asking in (client, other_client) * 10:
        assert (await submit(asking)).status_code == 202
    await deployment.dispatch()
    for lease in await deployment.claim():
        await deployment.answer(lease)
    statements = []

    def note(*arguments: Any) -> None:
        if "accounts" in arguments[2]:
            statements.append(arguments[2].split()[0])

    engine = deployment.context.database.engine.sync_engine
    event.listen(engine, "before_cursor_execute", note)
    await deployment.collect()
    event.remove(engine, "before_cursor_execute", note)
    assert statements == ["SELECT", "UPDATE"]
    assert await standing(client) == await standing(other_client) == (10 * USED, 0)


async def test_lines_that_are_skipped_reserve_nothing(
    client: httpx.AsyncClient, openai_client: AsyncOpenAI, deployment: Any
) -> None:
    good = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": BODY}
    content = json.dumps(good).encode() + b"\n{"
    file = await openai_client.files.create(file=("in.jsonl", content), purpose="batch")
    await openai_client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/completions",
        completion_window="24h",
        extra_body={"on_invalid": "skip"},
    )
    await deployment.control()
    assert await standing(client) == (0, MOST // 2)
    await deployment.finish_all()
    assert await standing(client) == (USED // 2, 0)
    assert await balanced(deployment)


async def delete(admin: httpx.AsyncClient, tenant: Any, month: str | None = None) -> httpx.Response:
    params = {} if month is None else {"month": month}
    return await admin.delete(f"/v1/admin/budgets/{tenant.tenant_id}", params=params)


async def test_a_deleted_budget_bounds_nothing_and_changes_nothing_that_was_accepted(
    admin: httpx.AsyncClient, client: httpx.AsyncClient, tenant: Any, deployment: Any
) -> None:
    await budget(admin, tenant, hard_nano=MOST)
    assert (await submit(client)).status_code == 202
    assert (await submit(client)).status_code == 429
    gone = await delete(admin, tenant)
    assert (gone.status_code, gone.json()["deleted"]) == (200, True)
    assert (await admin.get("/v1/admin/budgets")).json()["data"] == []
    assert await standing(client) == (0, MOST)  # what is on its way keeps its reservation
    assert (await client.get("/v1/budget")).json()["left"] is None
    assert (await submit(client)).status_code == 202
    await deployment.work()
    assert await standing(client) == (2 * USED, 0)
    assert await balanced(deployment)


async def test_without_its_own_budget_a_month_has_that_of_every_month(
    admin: httpx.AsyncClient, client: httpx.AsyncClient, tenant: Any, deployment: Any
) -> None:
    this_month = month_of(now_ms())
    await budget(admin, tenant, hard_nano=MOST, soft_nano=1)
    await budget(admin, tenant, month=this_month, hard_nano=10 * MOST)
    assert (await submit(client)).status_code == 202
    await deployment.work()
    assert (await submit(client)).status_code == 202
    assert await events(deployment) == []
    assert (await delete(admin, tenant, this_month)).json()["month"] == this_month
    assert (await submit(client)).status_code == 429  # over it already
    assert await events(deployment) == ["budget.threshold_reached"]
    await deployment.work()
    assert await standing(client) == (2 * USED, 0)
    assert await events(deployment) == ["budget.threshold_reached"]
    assert await balanced(deployment)


async def test_deleting_a_budget_that_is_not_in_force_tells_nobody(
    admin: httpx.AsyncClient, client: httpx.AsyncClient, tenant: Any, deployment: Any
) -> None:
    await budget(admin, tenant, soft_nano=1)
    await budget(admin, tenant, month=month_of(now_ms()), soft_nano=1)
    await submit(client)
    await deployment.work()
    assert await events(deployment) == ["budget.threshold_reached"]
    assert (await delete(admin, tenant)).status_code == 200
    await submit(client)
    await deployment.work()
    assert await events(deployment) == ["budget.threshold_reached"]


async def test_only_a_budget_that_is_there_can_be_deleted(
    admin: httpx.AsyncClient, client: httpx.AsyncClient, tenant: Any
) -> None:
    await budget(admin, tenant, hard_nano=1)
    for answer, status, param in (
        (await delete(admin, tenant, "2026-11"), 404, "month"),
        (await delete(admin, tenant, "2026-13"), 400, "month"),
        (await admin.delete("/v1/admin/budgets/nobody"), 404, "tenant"),
        (await client.delete(f"/v1/admin/budgets/{tenant.tenant_id}"), 403, None),
    ):
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert (await delete(admin, tenant)).status_code == 200
    again = await delete(admin, tenant)
    assert (again.status_code, again.json()["error"]["code"]) == (404, "budget_not_found")
