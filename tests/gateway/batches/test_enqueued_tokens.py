"""Enqueued tokens are counted by model, also in batches that ask for several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from gateway.adapters.base_models import register_base_model
from gateway.batches.finaliser import finalize_batch
from gateway.models import BatchModel

PROMPT = "0123456789"  # ten tokens


@pytest.fixture
async def second_model(deployment: Any, tiny_model: Path) -> None:
    async with deployment.context.database.write() as session:
        await register_base_model(session, "second", str(tiny_model))


@pytest.fixture
async def limited(admin: httpx.AsyncClient, tenant: Any) -> None:
    limits = {"tenant": tenant.tenant_id, "enqueued_tokens": 30}
    assert (await admin.post("/v1/admin/limits", json=limits)).status_code == 200


async def create(client: httpx.AsyncClient, deployment: Any, *models: str) -> dict[str, Any]:
    requests = [
        {"custom_id": str(number), "body": {"model": model, "prompt": PROMPT, "max_tokens": 1}}
        for number, model in enumerate(models)
    ]
    wanted = {"endpoint": "/v1/completions", "completion_window": "24h", "requests": requests}
    batch = (await client.post("/v1/batches", json=wanted)).json()
    await deployment.control()
    return (await client.get(f"/v1/batches/{batch['id']}")).json()


async def enqueued(deployment: Any, batch: dict[str, Any]) -> dict[str, int]:
    rows = select(BatchModel.model, BatchModel.enqueued_tokens)
    async with deployment.context.database.read() as session:
        found = await session.execute(rows.where(BatchModel.batch_id == batch["id"]))
        return {row[0]: row[1] for row in found}


async def test_every_model_has_a_count_of_its_own(
    client: httpx.AsyncClient, deployment: Any, second_model: None, limited: None
) -> None:
    mixed = await create(client, deployment, "tiny", "tiny", "second")
    assert (mixed["status"], mixed["model"]) == ("in_progress", None)
    assert await enqueued(deployment, mixed) == {"tiny": 20, "second": 10}
    refused = await create(client, deployment, "tiny", "tiny")
    assert refused["errors"]["data"][0]["code"] == "token_limit_exceeded"
    assert (await create(client, deployment, "tiny"))["status"] == "in_progress"
    refused = await create(client, deployment, "second", "tiny")
    assert "reached for tiny" in refused["errors"]["data"][0]["message"]
    assert (await create(client, deployment, "second", "second"))["status"] == "in_progress"
    assert (await create(client, deployment, "second"))["status"] == "failed"


async def test_counts_fall_as_lines_end(
    client: httpx.AsyncClient, deployment: Any, second_model: None, limited: None
) -> None:
    mixed = await create(client, deployment, "tiny", "second", "tiny")
    await deployment.dispatch()
    [lease] = await deployment.claim(1)
    await deployment.answer(lease)
    await deployment.collect()
    assert await enqueued(deployment, mixed) == {"tiny": 10, "second": 10}
    await client.post(f"/v1/batches/{mixed['id']}/cancel")
    await finalize_batch(deployment.context, mixed["id"], grace_ms=0)
    assert await enqueued(deployment, mixed) == {"tiny": 0, "second": 0}
    assert (await create(client, deployment, *["tiny"] * 3))["status"] == "in_progress"
