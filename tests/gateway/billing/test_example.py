"""The example of docs/billing.md, run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.billing.audit import audit
from gateway.billing.invoices import invoice_id
from gateway.kit.clock import now_ms
from gateway.kit.months import month_of

DOCUMENT = Path(__file__).parents[3] / "docs" / "billing.md"
BODY = {"model": "tiny", "prompt": "Hi", "max_tokens": 8}
JOB = {"endpoint": "/v1/completions", "body": BODY}


def tables() -> list[list[list[str]]]:
    """Rows of cells of each table, without their heads."""
    text = DOCUMENT.read_text().partition("## An example")[2].partition("## The audit")[0]
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [
        [[cell.strip() for cell in row.strip("|").split("|")] for row in block.splitlines()[2:]]
        for block in blocks
    ]


def number(cell: str) -> int:
    return int(cell.replace(",", ""))


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_the_documented_example(
    admin: httpx.AsyncClient, client: httpx.AsyncClient, tenant: Any, deployment: Any
) -> None:
    steps, lines = tables()
    await admin.post("/v1/admin/budgets", json={"tenant": tenant.tenant_id, "hard_nano": 10_000})
    seen = []

    async def look() -> None:
        now = (await client.get("/v1/budget")).json()
        seen.append([now[f"{name}_nano"] for name in ("spent", "reserved", "left")])

    job = await client.post("/v1/jobs", json=JOB)
    assert job.status_code == 202
    await deployment.dispatch()
    [job_lease] = await deployment.claim()
    await look()
    requests = [{"custom_id": str(number), "body": BODY} for number in range(2)]
    batch = {"endpoint": "/v1/completions", "completion_window": "24h", "requests": requests}
    assert (await client.post("/v1/batches", json=batch)).status_code == 200
    await deployment.control()
    await look()
    refused = await client.post("/v1/jobs", json=JOB)
    assert refused.json()["error"]["code"] == "budget_exceeded"
    await look()
    await deployment.answer(job_lease)
    await deployment.collect()
    await look()
    await deployment.dispatch()
    for cached, lease in enumerate(await deployment.claim()):
        await deployment.answer(lease, cached=cached)
    await deployment.collect()
    await deployment.finish_all()
    await look()
    assert seen == [[number(cell) for cell in row[2:]] for row in steps]

    path = f"/v1/invoices/{invoice_id(tenant.tenant_id, month_of(now_ms()))}"
    invoice = (await client.get(path)).json()
    fields = ("input_tokens", "cached_input_tokens", "output_tokens", "amount_nano")
    assert [
        [line["model"], line["class"], line["requests"], *(line[field] for field in fields)]
        for line in invoice["lines"]
    ] == [[*row[:2], *map(number, row[2:])] for row in lines]
    text = DOCUMENT.read_text()
    assert f"${invoice['exact_amount']} exactly, and to ${invoice['amount']} rounded" in text
    assert await audit(deployment.context.database, deployment.context.store) == []
