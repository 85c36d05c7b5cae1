from __future__ import annotations

from typing import Any

import httpx
import pytest

from gateway.billing.booking import book
from gateway.billing.service import dollars
from gateway.kit.context import Context
from gateway.kit.ids import new_id

DAY = 86_400
NOON = 1_750_000_000 // DAY * DAY + DAY // 2


@pytest.fixture
async def records(context: Context, tenant, other_tenant) -> None:
    """Three requests over two days, one correction, and another tenant's."""

    def record(owner: Any, day: int, model: str, kind: str, **fields: Any) -> dict[str, Any]:
        return {
            "id": new_id("usage"),
            "tenant_id": owner.tenant_id,
            "key_id": owner.key_id,
            "model": model,
            "base_model": "base",
            "adapter_revision_id": None,
            "request_class": kind,
            "price_id": "price_default",
            "created_at": (NOON + day * DAY) * 1000,
            "prompt_tokens": 10,
            "cached_tokens": 4,
            "completion_tokens": 5,
            **fields,
        }

    async with context.database.write() as session:
        await book(
            session,
            [
                record(tenant, 0, "base", "batch", amount_nano=100),
                record(tenant, 0, "bot", "standard", amount_nano=200, adapter_revision_id="r1"),
                record(tenant, 1, "bot", "batch", amount_nano=300, adapter_revision_id="r1"),
                record(other_tenant, 1, "base", "batch", amount_nano=10**12),
            ],
        )


WHOLE = {"from": NOON - DAY, "to": NOON + 2 * DAY}


@pytest.mark.usefixtures("records")
async def test_totals_are_the_tenants_own(client: httpx.AsyncClient) -> None:
    report = (await client.get("/v1/usage", params=WHOLE)).json()
    assert report["data"] == []
    assert report["total"] == {
        "requests": 0,  # no request rows stand behind these records
        "input_tokens": 30,
        "cached_input_tokens": 12,
        "output_tokens": 15,
        "total_tokens": 45,
        "amount_nano": 600,
        "amount": dollars(600),
    }


@pytest.mark.usefixtures("records")
@pytest.mark.parametrize(
    ("group_by", "expected"),
    [
        ("day", {NOON - DAY // 2: 300, NOON + DAY // 2: 300}),
        ("model", {"base": 100, "bot": 500}),
        ("class", {"batch": 400, "standard": 200}),
        ("adapter", {None: 100, "r1": 500}),
    ],
)
async def test_groups(client: httpx.AsyncClient, group_by: str, expected: dict[Any, int]) -> None:
    report = (await client.get("/v1/usage", params=WHOLE | {"group_by": group_by})).json()
    assert {group["group"]: group["amount_nano"] for group in report["data"]} == expected


@pytest.mark.usefixtures("records")
async def test_by_key(client: httpx.AsyncClient, tenant) -> None:
    report = (await client.get("/v1/usage", params=WHOLE | {"group_by": "key"})).json()
    assert [group["group"] for group in report["data"]] == [tenant.key_id]


@pytest.mark.usefixtures("records")
async def test_the_end_is_not_included(client: httpx.AsyncClient) -> None:
    params = {"from": NOON, "to": NOON + DAY}
    assert (await client.get("/v1/usage", params=params)).json()["total"]["amount_nano"] == 300


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"from": 5, "to": 5}, "from"),
        ({"from": "x"}, "from"),
        ({"to": 2**41}, "to"),
        ({"group_by": "tenant"}, "group_by"),
    ],
)
async def test_bad_parameters(
    client: httpx.AsyncClient, params: dict[str, Any], param: str
) -> None:
    answer = await client.get("/v1/usage", params=params)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_finished_work_shows_up(client: httpx.AsyncClient, deployment: Any) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    job = await client.post("/v1/jobs", json={"endpoint": "/v1/chat/completions", "body": body})
    await deployment.finish_all()
    usage = (await client.get(f"/v1/jobs/{job.json()['id']}")).json()["response"]["body"]["usage"]
    total = (await client.get("/v1/usage")).json()["total"]
    assert total["requests"] == 1
    assert total["input_tokens"] == usage["prompt_tokens"]
    assert total["output_tokens"] == usage["completion_tokens"]
    due = usage["prompt_tokens"] * 100 + usage["completion_tokens"] * 400
    assert total["amount_nano"] == due
