"""The audit finds nothing after honest work, and every kind of tampering."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import AsyncOpenAI
from sqlalchemy import delete, update

from gateway.billing.audit import audit, run_audit
from gateway.kit.store import delete_blob
from gateway.models import Account, Batch, Request, Result, UsageRecord

CHAT = "/v1/chat/completions"


def line(number: int) -> str:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x" * number}]}
    return json.dumps({"custom_id": f"r-{number}", "method": "POST", "url": CHAT, "body": body})


@pytest.fixture
async def finished(openai_client: AsyncOpenAI, client, deployment: Any) -> str:
    """A batch of five lines and two jobs, all answered."""
    content = "\n".join(line(number) for number in range(5)).encode()
    file = await openai_client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = await openai_client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h"
    )
    body = {"model": "tiny", "messages": [{"role": "user", "content": "job"}]}
    for _ in range(2):
        job = await client.post("/v1/jobs", json={"endpoint": CHAT, "body": body})
        assert job.status_code == 202
    await deployment.finish_all()
    done = await openai_client.batches.retrieve(batch.id)
    assert (done.status, done.request_counts.completed) == ("completed", 5)
    return batch.id


async def test_honest_work_passes(finished: str, context) -> None:
    assert await audit(context.database, context.store) == []


async def test_an_empty_deployment_passes(context) -> None:
    assert await audit(context.database, context.store) == []


TAMPERING = [
    (delete(UsageRecord), "completed but not metered"),
    (update(UsageRecord).values(amount_nano=1), "bills 1, due is"),
    (update(UsageRecord).values(completion_tokens=99), "meters Tokens"),
    (update(Batch).values(prompt_tokens=1), "counted Tokens(prompt=1"),
    (update(Batch).values(completed=4), "4 completed, 5 metered"),
    (update(Batch).values(output_file_id=None), "its output holds 0 lines"),
    (update(Request).values(state="failed"), "meters a request that is failed"),
    (update(Account).values(reserved_nano=7), "reserves 7, due is 0"),
    (update(Result).values(body={"usage": {"prompt_tokens": 1}}), "delivered Tokens(prompt=1"),
]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(("change", "message"), TAMPERING)
async def test_tampering_is_found(finished: str, context, change: Any, message: str) -> None:
    async with context.database.write() as session:
        await session.execute(change)
    found = [str(violation) for violation in await audit(context.database, context.store)]
    assert any(message in violation for violation in found), found
    assert len(set(found)) == len(found)


async def test_a_lost_output_is_found(finished: str, context) -> None:
    async with context.database.read() as session:
        batch = await session.get_one(Batch, finished)
    await delete_blob(context.store, f"files/{batch.output_file_id}")
    found = await audit(context.database, context.store)
    assert [violation.message for violation in found] == ["its output is not in the store"]


def test_the_command_line_audits_without_redis(settings) -> None:
    assert run_audit(settings.model_copy(update={"redis_url": None})) == []
