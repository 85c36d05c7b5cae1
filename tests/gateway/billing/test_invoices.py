"""Invoices: drafts grow, months close once, and every nanodollar is on one line."""

from __future__ import annotations

import asyncio
import csv
import io
from typing import Any

import httpx
import pytest
from sqlalchemy import delete, func, select, update

from gateway.billing.audit import audit
from gateway.billing.invoices import cents, close_invoices, close_month, invoice_id
from gateway.billing.storage import HOUR_MS, METER, meter_hour, meter_storage, storage_nano
from gateway.heartbeats import touch
from gateway.kit.clock import now_ms
from gateway.kit.months import end_of, month_of, months_later, start_of
from gateway.models import (
    Account,
    Adapter,
    AdapterRevision,
    Invoice,
    InvoiceLine,
    StoragePrice,
    StorageRecord,
    UsageHour,
    UsageRecord,
    WebhookEvent,
)
from tests.gateway.rows import book_again

BODY = {"model": "tiny", "prompt": "Hi", "max_tokens": 8}
JOB = {"endpoint": "/v1/completions", "body": BODY}
USED = 2 * 100 + 5 * 400  # nanodollars, of BODY answered with "hello"

THIS_MONTH = month_of(now_ms())
LAST_MONTH = months_later(THIS_MONTH, -1)


async def jobs(client: httpx.AsyncClient, deployment: Any, count: int = 1, **job: Any) -> list[str]:
    ids = []
    for _ in range(count):
        answer = await client.post("/v1/jobs", json={**JOB, **job})
        ids.append(answer.json()["id"])
    await deployment.work()
    return ids


async def backdate(deployment: Any, month: str = LAST_MONTH) -> None:
    """Everything used so far was used at the end of `month`."""
    async with deployment.context.database.write() as session:
        await session.execute(update(UsageRecord).values(created_at=end_of(month) - 1))
        await book_again(session)
        await session.execute(
            update(Account).where(Account.month == THIS_MONTH).values(month=month)
        )


async def found(deployment: Any) -> list[str]:
    violations = await audit(deployment.context.database, deployment.context.store)
    return [str(violation) for violation in violations]


async def shown(client: httpx.AsyncClient, tenant: Any, month: str) -> dict[str, Any]:
    answer = await client.get(f"/v1/invoices/{invoice_id(tenant.tenant_id, month)}")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def count(deployment: Any, table: Any) -> int:
    async with deployment.context.database.read() as session:
        return await session.scalar(select(func.count()).select_from(table)) or 0


@pytest.mark.parametrize(
    ("nano", "rounded"),
    [(0, 0), (4_999_999, 0), (5_000_000, 1), (-5_000_000, -1), (10**9, 100), (-(10**9), -100)],
)
def test_lines_are_rounded_to_cents(nano: int, rounded: int) -> None:
    assert cents(nano) == rounded


async def test_a_draft_grows_with_use(
    client: httpx.AsyncClient, tenant: Any, deployment: Any
) -> None:
    empty = await shown(client, tenant, THIS_MONTH)
    assert (empty["status"], empty["lines"], empty["amount"]) == ("draft", [], "0.00")
    await jobs(client, deployment, 2)
    await jobs(client, deployment, 1, priority="batch")
    draft = await shown(client, tenant, THIS_MONTH)
    assert [
        (line["model"], line["class"], line["requests"], line["amount_nano"])
        for line in draft["lines"]
    ] == [("tiny", "batch", 1, USED // 2), ("tiny", "standard", 2, 2 * USED)]
    assert draft["exact_amount"] == "0.000005500"
    [listed] = (await client.get("/v1/invoices")).json()["data"]
    assert listed == {name: draft[name] for name in listed}
    assert await count(deployment, Invoice) == 0


async def test_a_month_is_closed_once_and_the_tenant_told(
    client: httpx.AsyncClient, tenant: Any, deployment: Any
) -> None:
    await jobs(client, deployment, 2)
    await backdate(deployment)
    assert (await shown(client, tenant, LAST_MONTH))["status"] == "draft"
    closed = await asyncio.gather(*(close_month(deployment.context, LAST_MONTH) for _ in range(4)))
    assert sum(closed) == 1
    invoice = await shown(client, tenant, LAST_MONTH)
    assert (invoice["status"], invoice["amount_nano"]) == ("final", 2 * USED)
    assert invoice["period_start"] == start_of(LAST_MONTH) // 1000
    assert await found(deployment) == []
    listed = (await client.get("/v1/invoices")).json()["data"]
    assert [(each["month"], each["status"]) for each in listed] == [
        (THIS_MONTH, "draft"),
        (LAST_MONTH, "final"),
    ]
    async with deployment.context.database.read() as session:
        bodies = list(await session.scalars(select(WebhookEvent.body)))
    assert sum(invoice["id"] in body and "invoice.finalized" in body for body in bodies) == 1


async def test_months_close_when_they_are_over_and_metered(
    client: httpx.AsyncClient, deployment: Any
) -> None:
    context = deployment.context
    await jobs(client, deployment)
    await backdate(deployment)
    assert await close_invoices(context) == 0  # adapters have not been metered
    await meter_storage(context)
    delay = (now_ms() - end_of(LAST_MONTH)) // HOUR_MS + 1
    object.__setattr__(context.settings, "invoice_delay_hours", delay)
    assert await close_invoices(context) == 0
    object.__setattr__(context.settings, "invoice_delay_hours", 0)
    assert await close_invoices(context) == 1
    assert await close_invoices(context) == 0
    assert await found(deployment) == []


async def test_what_comes_late_is_on_the_next_invoice(
    client: httpx.AsyncClient, tenant: Any, deployment: Any
) -> None:
    before = months_later(LAST_MONTH, -1)
    await jobs(client, deployment, 2)
    await backdate(deployment, before)
    await close_month(deployment.context, before)
    await jobs(client, deployment, 3)
    async with deployment.context.database.write() as session:
        rows = select(UsageRecord.id).where(UsageRecord.created_at >= start_of(THIS_MONTH))
        late, *others = list(await session.scalars(rows))
        for row_id, month in [(late, before), *((other, LAST_MONTH) for other in others)]:
            changed = update(UsageRecord).where(UsageRecord.id == row_id)
            await session.execute(changed.values(created_at=end_of(month) - 1))
        await book_again(session)
        await session.execute(update(Account).values(month=LAST_MONTH, spent_nano=2 * USED))
    assert await found(deployment) == []
    await close_month(deployment.context, LAST_MONTH)
    invoice = await shown(client, tenant, LAST_MONTH)
    assert [(line["kind"], line["period"], line["amount_nano"]) for line in invoice["lines"]] == [
        ("usage", LAST_MONTH, 2 * USED),
        ("late", before, USED),
    ]
    assert (await shown(client, tenant, before))["amount_nano"] == 2 * USED
    assert await found(deployment) == []


TAMPERING = [
    (update(InvoiceLine).values(amount_cents=7), "to 7 cents"),
    (update(InvoiceLine).values(amount_nano=10**10, amount_cents=1000), "is not the sum"),
    (update(Invoice).values(amount_cents=1), "is not the sum of its lines"),
    (update(UsageRecord).values(created_at=5), "were used"),
    (update(UsageRecord).values(created_at=5), "is not the sum of its rows"),
    (update(UsageHour).values(cached_tokens=1), "is not the sum of its rows"),
    (update(UsageHour).values(kind="correction"), "is not the sum of its rows"),
    (delete(UsageHour), "is not the sum of its rows"),
    (update(Account).values(spent_nano=3), "has spent 3"),
]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(("change", "message"), TAMPERING)
async def test_tampering_is_found(
    client: httpx.AsyncClient, deployment: Any, change: Any, message: str
) -> None:
    await jobs(client, deployment)
    await backdate(deployment)
    await close_month(deployment.context, LAST_MONTH)
    async with deployment.context.database.write() as session:
        await session.execute(change)
    assert any(message in violation for violation in await found(deployment))


async def test_as_a_table(client: httpx.AsyncClient, tenant: Any, deployment: Any) -> None:
    await jobs(client, deployment)
    path = f"/v1/invoices/{invoice_id(tenant.tenant_id, THIS_MONTH)}"
    answer = await client.get(f"{path}.csv")
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    [row] = csv.DictReader(io.StringIO(answer.text))
    assert (row["model"], row["exact_amount"], row["status"]) == ("tiny", "0.000002200", "draft")
    assert (await client.get("/v1/invoices/invoice_nothing.csv")).status_code == 404


async def test_other_months_and_tenants_are_unknown(
    client: httpx.AsyncClient, tenant: Any, other_tenant: Any, deployment: Any
) -> None:
    theirs = invoice_id(other_tenant.tenant_id, THIS_MONTH)
    for unknown in (theirs, invoice_id(tenant.tenant_id, "2001-01"), "x"):
        answer = await client.get(f"/v1/invoices/{unknown}")
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == f"No invoice found with id '{unknown}'."


async def test_corrections_are_rows_of_their_own(
    admin: httpx.AsyncClient, client: httpx.AsyncClient, tenant: Any, deployment: Any
) -> None:
    [job] = await jobs(client, deployment)
    await backdate(deployment)
    await close_month(deployment.context, LAST_MONTH)
    wanted = {"request_id": job, "amount_nano": -USED, "reason": "it was our fault"}
    corrected = await admin.post("/v1/admin/corrections", json=wanted)
    assert corrected.status_code == 201, corrected.text
    again = await admin.post("/v1/admin/corrections", json=wanted)
    assert (again.status_code, again.json()["error"]["param"]) == (400, "amount_nano")
    draft = await shown(client, tenant, THIS_MONTH)
    assert [(line["kind"], line["amount_nano"]) for line in draft["lines"]] == [
        ("correction", -USED)
    ]
    assert (await client.get("/v1/budget")).json()["spent_nano"] == -USED
    listed = (await admin.get("/v1/admin/corrections")).json()["data"]
    assert listed == [corrected.json()]
    assert (await shown(client, tenant, LAST_MONTH))["amount_nano"] == USED
    unknown = await admin.post("/v1/admin/corrections", json={**wanted, "request_id": "x"})
    assert unknown.status_code == 404
    assert await found(deployment) == []


async def test_a_correction_that_is_sent_twice_with_one_key_is_made_once(
    admin: httpx.AsyncClient, client: httpx.AsyncClient, deployment: Any
) -> None:
    [job] = await jobs(client, deployment)
    wanted = {"request_id": job, "amount_nano": 5, "reason": "more"}
    headers = {"Idempotency-Key": "k"}
    sent = [
        await admin.post("/v1/admin/corrections", json=wanted, headers=headers) for _ in range(2)
    ]
    assert [each.status_code for each in sent] == [201, 201]
    assert sent[0].json() == sent[1].json()
    assert (await client.get("/v1/budget")).json()["spent_nano"] == USED + 5
    other = {**wanted, "amount_nano": 6}
    clash = await admin.post("/v1/admin/corrections", json=other, headers=headers)
    assert (clash.status_code, clash.json()["error"]["code"]) == (409, "idempotency_conflict")


async def add_adapters(deployment: Any, tenant_id: str | None, *sizes: int, ready_at: int) -> None:
    async with deployment.context.database.write() as session:
        for number, size in enumerate(sizes):
            adapter = Adapter(
                id=f"adapter_{size}",
                tenant_id=tenant_id,
                name=f"a{number}",
                base_model="tiny",
                created_at=ready_at,
            )
            session.add(adapter)
            await session.flush()
            for revision in (1, 2):  # the same content twice is stored once
                session.add(
                    AdapterRevision(
                        id=f"rev_{size}_{revision}",
                        adapter_id=adapter.id,
                        tenant_id=tenant_id,
                        number=revision,
                        status="ready",
                        digest=str(number) * 64,
                        bytes=size,
                        upload_key="x",
                        created_at=ready_at,
                        finished_at=ready_at,
                    )
                )


def test_storage_is_priced_by_the_gib_hour() -> None:
    price = StoragePrice(gib_hour_nano=137_000)
    assert storage_nano(price, 2**30) == 137_000
    assert storage_nano(price, 2**29) == 68_500
    assert storage_nano(price, 1) == 0


async def test_adapters_are_metered_once_an_hour(
    admin: httpx.AsyncClient, client: httpx.AsyncClient, tenant: Any, deployment: Any
) -> None:
    context = deployment.context
    this_hour = now_ms() - now_ms() % HOUR_MS
    ready_at = this_hour - 3 * HOUR_MS
    await add_adapters(deployment, tenant.tenant_id, 2**30, 2**29, ready_at=ready_at)
    await add_adapters(deployment, None, 2**28, ready_at=ready_at)  # the operator's
    assert await meter_storage(context) == 0  # it begins now
    async with context.database.write() as session:
        await touch(session, METER, this_hour - 4 * HOUR_MS)
        await session.execute(
            update(Adapter).where(Adapter.id == f"adapter_{2**29}").values(deleted_at=this_hour - 1)
        )
    assert await meter_storage(context) == 4
    assert await meter_storage(context) == 0
    await meter_hour(context, this_hour - HOUR_MS)  # a second control process
    async with context.database.read() as session:
        rows = select(StorageRecord.bytes).order_by(StorageRecord.created_at)
        assert list(await session.scalars(rows)) == [3 * 2**29, 3 * 2**29, 2**30]
    assert await found(deployment) == []
    seconds = {"from": this_hour // 1000 - 2 * 3600, "to": this_hour // 1000}
    usage = (await client.get("/v1/usage", params=seconds)).json()["storage"]
    assert (usage["gib_hours"], usage["amount_nano"]) == ("2.500000", 205_500 + 137_000)
    month = month_of(this_hour - 2 * HOUR_MS)
    if month_of(this_hour - 3 * HOUR_MS) == month == month_of(this_hour - 1):
        [line] = (await shown(client, tenant, month))["lines"]
        assert (line["kind"], line["gib_hours"]) == ("storage", "4.000000")
        assert line["amount_nano"] == 4 * 137_000


async def test_operators_price_storage(admin: httpx.AsyncClient) -> None:
    new = await admin.post("/v1/admin/storage_prices", json={"gib_hour_nano": 5})
    assert new.status_code == 201
    listed = (await admin.get("/v1/admin/storage_prices")).json()["data"]
    assert [each["gib_hour_nano"] for each in listed] == [5, 137_000]
