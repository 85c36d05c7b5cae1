"""Sums of hours: what the rows are, whoever books them, in which order and how often."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import defaultdict
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from gateway.billing.audit import audit
from gateway.billing.booking import HOUR_MS, book
from gateway.kit.context import Context
from gateway.kit.ids import new_id
from gateway.models import UsageHour, UsageRecord
from gateway.usage.repository import GroupBy, UsageRepository, total_of

EIGHT = 1_750_000_000_000 // HOUR_MS * HOUR_MS


def record(owner: Any, at: int, **fields: Any) -> dict[str, Any]:
    return {
        "id": new_id("usage"),
        "tenant_id": owner.tenant_id,
        "key_id": owner.key_id,
        "model": "base",
        "base_model": "base",
        "adapter_revision_id": None,
        "request_class": "standard",
        "price_id": "price_default",
        "created_at": at,
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "completion_tokens": 5,
        "amount_nano": 7,
        **fields,
    }


async def hours(context: Context) -> list[UsageHour]:
    async with context.database.read() as session:
        return list(await session.scalars(select(UsageHour).order_by(UsageHour.created_at)))


async def test_rows_that_are_alike_share_a_sum(context: Context, tenant: Any) -> None:
    last = EIGHT + HOUR_MS - 1
    for rows in (
        [record(tenant, EIGHT), record(tenant, last), record(tenant, EIGHT, model="bot")],
        [record(tenant, last, amount_nano=-3), record(tenant, EIGHT + HOUR_MS)],
    ):
        async with context.database.write() as session:
            assert await book(session, rows) == rows
    shown = [(hour.created_at, hour.model, hour.amount_nano) for hour in await hours(context)]
    assert sorted(shown) == [
        (EIGHT, "base", 7 + 7 - 3),
        (EIGHT, "bot", 7),
        (EIGHT + HOUR_MS, "base", 7),
    ]


async def test_a_row_that_is_there_already_counts_once(context: Context, tenant: Any) -> None:
    row = record(tenant, EIGHT)
    for new in ([row], []):
        async with context.database.write() as session:
            assert await book(session, [row]) == new
    [hour] = await hours(context)
    assert (hour.prompt_tokens, hour.cached_tokens, hour.completion_tokens) == (10, 4, 5)


async def test_what_is_rolled_back_is_not_in_the_sums(context: Context, tenant: Any) -> None:
    async def fail() -> None:
        async with context.database.write() as session:
            await book(session, [record(tenant, EIGHT)])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert await hours(context) == []


async def test_many_may_book_the_same_hours_at_once(
    context: Context, tenant: Any, other_tenant: Any
) -> None:
    """In any order: sums are locked in the order of their keys."""

    async def some(seed: int) -> None:
        mixed = [
            record(owner, EIGHT, model=model)
            for owner, model in itertools.product((tenant, other_tenant), "abcdef")
        ]
        random.Random(seed).shuffle(mixed)
        async with context.database.write() as session:
            await book(session, mixed)

    await asyncio.gather(*map(some, range(20)))
    found = await hours(context)
    assert len(found) == 12
    assert {hour.amount_nano for hour in found} == {20 * 7}
    violations = await audit(context.database, context.store)
    assert not [each for each in violations if "is not the sum of its rows" in each.message]


@pytest.mark.parametrize("group_by", [None, "day", "adapter", "model", "class", "key"])
async def test_any_span_of_time_is_the_sum_of_its_rows(
    context: Context, tenant: Any, other_tenant: Any, group_by: GroupBy | None
) -> None:
    chance = random.Random(5)
    rows = [
        record(
            chance.choice((tenant, other_tenant)),
            EIGHT + chance.randrange(60 * HOUR_MS),
            model=chance.choice("ab"),
            adapter_revision_id=chance.choice((None, "r1")),
            request_class=chance.choice(("batch", "standard")),
            amount_nano=chance.randrange(100),
        )
        for _ in range(400)
    ]
    async with context.database.write() as session:
        await book(session, rows)
    edges = [chance.randrange(-HOUR_MS, 61 * HOUR_MS) for _ in range(20)]
    edges += [0, HOUR_MS, HOUR_MS + 1, 24 * HOUR_MS, 60 * HOUR_MS]
    async with context.database.read() as session:
        repository = UsageRepository(session, tenant.scope)
        for start, end in itertools.pairwise(chance.sample(edges, len(edges))):
            low, high = EIGHT + min(start, end), EIGHT + max(start, end)
            due: dict[Any, int] = defaultdict(int)
            for row in rows:
                if row["tenant_id"] == tenant.tenant_id and low <= row["created_at"] < high:
                    due[group_of(row, group_by)] += row["amount_nano"]
            sums = await repository.sums(low, high, group_by)
            assert {each.group: each.amount_nano for each in sums} == due, (low, high)
            assert total_of(sums).amount_nano == sum(due.values())


def group_of(row: dict[str, Any], group_by: GroupBy | None) -> Any:
    match group_by:
        case None:
            return None
        case "day":
            return row["created_at"] // (24 * HOUR_MS) * 24 * HOUR_MS
        case "adapter":
            return row["adapter_revision_id"]
        case "model":
            return row["model"]
        case "class":
            return row["request_class"]
        case "key":
            return row["key_id"]


async def test_the_running_hour_is_whole_until_now(
    client: httpx.AsyncClient, deployment: Any
) -> None:
    """`/v1/usage` up to now reads sums alone: also without the rows the report is the same."""
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 8}
    job = await client.post("/v1/jobs", json={"endpoint": "/v1/completions", "body": body})
    await deployment.finish_all()
    before = (await client.get("/v1/usage", params={"group_by": "model"})).json()
    assert before["total"]["requests"] == 1
    async with deployment.context.database.write() as session:
        [row] = await session.scalars(select(UsageRecord))
        assert row.request_id == job.json()["id"]
        await session.delete(row)
    after = (await client.get("/v1/usage", params={"group_by": "model"})).json()
    assert (after["data"], after["total"]) == (before["data"], before["total"])
