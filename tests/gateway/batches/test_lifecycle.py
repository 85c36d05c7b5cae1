"""Batches from upload to download, through the official client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from sqlalchemy import func, select, update

from gateway.batches.finaliser import finalize_batch
from gateway.batches.validation import validate_batch
from gateway.models import Batch, Request, UsageRecord

CHAT = "/v1/chat/completions"


def line(custom_id: str, text: str = "Hi", **body: Any) -> bytes:
    messages = [{"role": "user", "content": text}]
    return json.dumps(
        {
            "custom_id": custom_id,
            "method": "POST",
            "url": CHAT,
            "body": {"model": "tiny", "messages": messages, "max_tokens": 8, **body},
        }
    ).encode()


async def create(client: AsyncOpenAI, content: bytes, **options: Any) -> Any:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", **options
    )


async def read_lines(client: AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    content = await client.files.content(file_id)
    return [json.loads(each) for each in content.text.split("\n") if each]


async def audit(deployment: Any, batch: Any, out: list[dict[str, Any]]) -> None:
    """Σ usage rows = Σ usage in the output file = batch.usage, to the token."""
    async with deployment.context.database.read() as session:
        rows = list(
            await session.scalars(select(UsageRecord).where(UsageRecord.batch_id == batch.id))
        )
        stored = await session.get_one(Batch, batch.id)
    usages = [each["response"]["body"]["usage"] for each in out]
    assert len(rows) == len(usages)
    for stored_sum, shown, name in (
        (sum(row.prompt_tokens for row in rows), batch.usage.input_tokens, "prompt_tokens"),
        (
            sum(row.completion_tokens for row in rows),
            batch.usage.output_tokens,
            "completion_tokens",
        ),
    ):
        assert stored_sum == shown == sum(usage[name] for usage in usages)
    assert stored.enqueued_tokens == 0


async def test_a_batch_runs_from_upload_to_download(
    openai_client: AsyncOpenAI, deployment: Any
) -> None:
    content = b"\n".join(line(f"r-{n}", f"question {n}") for n in range(7))
    batch = await create(openai_client, content, metadata={"team": "a"})
    assert batch.status == "validating"
    await deployment.control()
    running = await openai_client.batches.retrieve(batch.id)
    assert running.status == "in_progress"
    assert running.request_counts.total == 7
    assert running.model == "tiny"
    await deployment.finish_all()
    done = await openai_client.batches.retrieve(batch.id)
    assert done.status == "completed"
    assert done.metadata == {"team": "a"}
    assert (done.request_counts.completed, done.request_counts.failed) == (7, 0)
    assert done.error_file_id is None
    out = await read_lines(openai_client, done.output_file_id)
    assert [each["custom_id"] for each in out] == [f"r-{n}" for n in range(7)]
    assert out[0]["response"]["body"]["choices"][0]["message"]["content"] == "hello"
    assert out[0]["error"] is None
    await audit(deployment, done, out)
    listed = await openai_client.batches.list(limit=1)
    assert [each.id for each in listed.data] == [batch.id]
    files = [file.id async for file in openai_client.files.list(purpose="batch_output")]
    assert files == [done.output_file_id]
    with pytest.raises(openai.ConflictError, match="Cannot cancel a batch with status 'completed'"):
        await openai_client.batches.cancel(batch.id)


async def test_failed_lines_are_in_the_error_file_and_the_batch_completes(
    openai_client: AsyncOpenAI, deployment: Any
) -> None:
    batch = await create(openai_client, b"\n".join(line(f"r-{n}") for n in range(4)))
    await deployment.control()
    await deployment.dispatch()
    first, second, *rest = await deployment.claim()
    await deployment.fail(first, "adapter_unavailable")
    await deployment.fail(second, "engine_error")
    for lease in rest:
        await deployment.answer(lease)
    await deployment.collect()
    await deployment.control()
    done = await openai_client.batches.retrieve(batch.id)
    assert done.status == "completed"
    assert (done.request_counts.completed, done.request_counts.failed) == (2, 2)
    out = await read_lines(openai_client, done.output_file_id)
    errors = await read_lines(openai_client, done.error_file_id)
    assert len(out) == len(errors) == 2
    by_code = {each["response"]["body"]["error"]["code"]: each["response"] for each in errors}
    assert by_code["adapter_unavailable"]["status_code"] == 404
    assert by_code["engine_error"]["status_code"] == 500
    assert all(each["error"] is None for each in errors)
    await audit(deployment, done, out)


async def test_a_batch_whose_lines_all_fail_is_completed_without_output(
    openai_client: AsyncOpenAI, deployment: Any
) -> None:
    batch = await create(openai_client, line("only"))
    await deployment.control()
    await deployment.dispatch()
    for lease in await deployment.claim():
        await deployment.fail(lease, "invalid_request")
    await deployment.collect()
    await deployment.control()
    done = await openai_client.batches.retrieve(batch.id)
    assert (done.status, done.output_file_id) == ("completed", None)
    assert len(await read_lines(openai_client, done.error_file_id)) == 1


async def test_cancelling_keeps_what_is_done_and_accounts_for_every_line(
    openai_client: AsyncOpenAI, deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(deployment.context.settings.__dict__, "queue_window", 6)
    batch = await create(openai_client, b"\n".join(line(f"r-{n}") for n in range(10)))
    await deployment.control()
    await deployment.dispatch()
    done_one, running, *_ = await deployment.claim(2)
    await deployment.answer(done_one)
    await deployment.collect()
    cancelling = await openai_client.batches.cancel(batch.id)
    assert cancelling.status == "cancelling"
    assert await deployment.dispatch() == 0
    await deployment.control()
    assert (await openai_client.batches.retrieve(batch.id)).status == "cancelling"
    assert await deployment.answer(running, "late but in time")
    await deployment.collect()
    await deployment.control()
    done = await openai_client.batches.retrieve(batch.id)
    assert done.status == "cancelled"
    assert done.cancelled_at is not None
    out = await read_lines(openai_client, done.output_file_id)
    errors = await read_lines(openai_client, done.error_file_id)
    assert len(out) == 2
    assert sorted(each["custom_id"] for each in out + errors) == sorted(f"r-{n}" for n in range(10))
    assert {each["error"]["code"] for each in errors} <= {"batch_cancelled", "cancelled"}
    assert all(each["response"] is None for each in errors)
    await audit(deployment, done, out)
    again = await openai_client.batches.cancel(batch.id)
    assert again.status == "cancelled"


async def test_a_worker_that_never_answers_does_not_keep_a_batch_cancelling(
    openai_client: AsyncOpenAI, deployment: Any
) -> None:
    batch = await create(openai_client, b"\n".join(line(f"r-{n}") for n in range(3)))
    await deployment.control()
    await deployment.dispatch()
    leases = await deployment.claim()
    await openai_client.batches.cancel(batch.id)
    assert not await finalize_batch(deployment.context, batch.id)
    assert await finalize_batch(deployment.context, batch.id, grace_ms=0)
    done = await openai_client.batches.retrieve(batch.id)
    assert done.status == "cancelled"
    for lease in leases:
        await deployment.answer(lease)
    await deployment.collect()
    after = await openai_client.batches.retrieve(batch.id)
    assert after == done
    assert len(await read_lines(openai_client, done.error_file_id)) == 3
    await audit(deployment, after, [])


async def test_cancelling_while_validating_runs_nothing(
    openai_client: AsyncOpenAI, deployment: Any
) -> None:
    batch = await create(openai_client, line("a"))
    await openai_client.batches.cancel(batch.id)
    await deployment.control()
    done = await openai_client.batches.retrieve(batch.id)
    assert (done.status, done.request_counts.total) == ("cancelled", 0)
    assert done.output_file_id is done.error_file_id is None
    assert await deployment.work() == 0


async def test_an_expired_batch_keeps_what_is_done(
    openai_client: AsyncOpenAI, deployment: Any
) -> None:
    batch = await create(openai_client, b"\n".join(line(f"r-{n}") for n in range(5)))
    await deployment.control()
    await deployment.dispatch()
    done_one, running, *_ = await deployment.claim(2)
    await deployment.answer(done_one)
    await deployment.collect()
    async with deployment.context.database.write() as session:
        await session.execute(update(Batch).values(expires_at=1000))
    assert await finalize_batch(deployment.context, batch.id)
    done = await openai_client.batches.retrieve(batch.id)
    assert (done.status, done.request_counts.completed) == ("expired", 1)
    out = await read_lines(openai_client, done.output_file_id)
    errors = await read_lines(openai_client, done.error_file_id)
    assert len(out) + len(errors) == 5
    assert {each["error"]["code"] for each in errors} == {"batch_expired"}
    assert (await deployment.queue.renew("worker-1", [running])).cancelled
    await audit(deployment, done, out)
    with pytest.raises(openai.ConflictError):
        await openai_client.batches.cancel(batch.id)


async def test_duplicates_of_a_control_task_that_run_at_once_expand_a_batch_once(
    openai_client: AsyncOpenAI, deployment: Any
) -> None:
    """A broker may deliver a message again while its first delivery is still being worked on."""
    batch = await create(openai_client, b"\n".join(line(f"r-{n}") for n in range(700)))
    await asyncio.gather(
        *(validate_batch(deployment.context, deployment.tasks, batch.id) for _ in range(4))
    )
    await deployment.finish_all()
    await asyncio.gather(*(finalize_batch(deployment.context, batch.id) for _ in range(4)))
    done = await openai_client.batches.retrieve(batch.id)
    assert (done.status, done.request_counts.completed) == ("completed", 700)
    out = await read_lines(openai_client, done.output_file_id)
    assert [each["custom_id"] for each in out] == [f"r-{n}" for n in range(700)]
    await audit(deployment, done, out)


async def test_finalising_twice_writes_one_pair_of_files(
    openai_client: AsyncOpenAI, deployment: Any
) -> None:
    batch = await create(openai_client, line("a"))
    await deployment.finish_all()
    done = await openai_client.batches.retrieve(batch.id)
    assert await finalize_batch(deployment.context, batch.id)
    assert await openai_client.batches.retrieve(batch.id) == done


async def test_a_crash_between_the_files_and_their_names_is_repeated(
    openai_client: AsyncOpenAI, deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = await create(openai_client, line("a"))
    await deployment.control()
    await deployment.work()
    deployment.tasks.sent.clear()

    class Crash(BaseException):
        pass

    def crash(*_: Any) -> None:
        raise Crash

    with monkeypatch.context() as patched:
        patched.setattr("gateway.batches.finaliser.end_batch", crash)
        with pytest.raises(Crash):
            await finalize_batch(deployment.context, batch.id)
    assert (await openai_client.batches.retrieve(batch.id)).status == "finalizing"
    assert await finalize_batch(deployment.context, batch.id)
    done = await openai_client.batches.retrieve(batch.id)
    assert done.status == "completed"
    assert len(await read_lines(openai_client, done.output_file_id)) == 1


async def test_validation_resumes_where_it_stopped(
    openai_client: AsyncOpenAI, deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.batches.reader.CHUNK_LINES", 3)
    batch = await create(openai_client, b"\n".join(line(f"r-{n}") for n in range(10)))
    deployment.tasks.sent.clear()
    calls = 0
    while (await openai_client.batches.retrieve(batch.id)).status == "validating":
        await validate_batch(deployment.context, deployment.tasks, batch.id, budget=0)
        calls += 1
    assert calls == 5
    async with deployment.context.database.read() as session:
        assert await session.scalar(select(func.count()).select_from(Request)) == 10
    await deployment.finish_all()
    done = await openai_client.batches.retrieve(batch.id)
    assert (done.status, done.request_counts.completed) == ("completed", 10)


async def test_results_so_far_are_served_in_input_order(
    openai_client: AsyncOpenAI, client: httpx.AsyncClient, deployment: Any
) -> None:
    batch = await create(openai_client, b"\n".join(line(f"r-{n}") for n in range(3)))
    await deployment.control()
    await deployment.dispatch()
    leases = await deployment.claim()
    await deployment.answer(leases[2])
    await deployment.answer(leases[0])
    await deployment.collect()
    some = await client.get(f"/v1/batches/{batch.id}/results")
    assert some.headers["x-incomplete"] == "true"
    found = [json.loads(each)["custom_id"] for each in some.text.splitlines()]
    assert len(found) == 2
    assert found == sorted(found)
    await deployment.answer(leases[1])
    await deployment.collect()
    await deployment.control()
    everything = await client.get(f"/v1/batches/{batch.id}/results")
    assert "x-incomplete" not in everything.headers
    assert len(everything.text.splitlines()) == 3


async def test_inline_requests_make_an_input_file(
    openai_client: AsyncOpenAI, client: httpx.AsyncClient, deployment: Any
) -> None:
    requests = [{"custom_id": "a", "body": json.loads(line("a"))["body"]}]
    wanted = {"endpoint": CHAT, "completion_window": "90m", "requests": requests}
    headers = {"Idempotency-Key": "k"}
    created = (await client.post("/v1/batches", json=wanted, headers=headers)).json()
    again = (await client.post("/v1/batches", json=wanted, headers=headers)).json()
    assert again == created
    assert created["expires_at"] - created["created_at"] == 90 * 60
    await deployment.finish_all()
    done = await openai_client.batches.retrieve(created["id"])
    assert done.status == "completed"
    assert len(await read_lines(openai_client, done.output_file_id)) == 1
    assert len((await openai_client.batches.list()).data) == 1


async def test_a_batch_of_another_tenant_looks_unknown(
    openai_client: AsyncOpenAI, other_client: httpx.AsyncClient, deployment: Any
) -> None:
    batch = await create(openai_client, line("a"))
    for path in ("", "/results"):
        theirs = await other_client.get(f"/v1/batches/{batch.id}{path}")
        unknown = await other_client.get(f"/v1/batches/batch_x{path}")
        assert theirs.status_code == unknown.status_code == 404
        assert theirs.text.replace(batch.id, "batch_x") == unknown.text
    assert (await other_client.post(f"/v1/batches/{batch.id}/cancel")).status_code == 404
    stolen = await other_client.post(
        "/v1/batches",
        json={
            "input_file_id": batch.input_file_id,
            "endpoint": CHAT,
            "completion_window": "24h",
        },
    )
    assert (stolen.status_code, stolen.json()["error"]["param"]) == (400, "input_file_id")


async def test_deleting_the_input_file_does_not_stop_its_batch(
    openai_client: AsyncOpenAI, deployment: Any
) -> None:
    batch = await create(openai_client, line("a"))
    await openai_client.files.delete(batch.input_file_id)
    await deployment.finish_all()
    assert (await openai_client.batches.retrieve(batch.id)).status == "completed"


@pytest.mark.parametrize(
    ("changed", "param", "code"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint", "invalid_value"),
        ({"completion_window": "48x"}, "completion_window", "invalid_value"),
        ({"completion_window": "169h"}, "completion_window", "invalid_value"),
        ({"completion_window": "0h"}, "completion_window", "invalid_value"),
        ({"metadata": {"tags": ["a"]}}, "metadata.tags", "invalid_type"),
        ({"input_file_id": "file_x"}, "input_file_id", "invalid_request"),
        ({"input_file_id": None}, "input_file_id", "missing_required_parameter"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, None, "invalid_value"),
    ],
)
async def test_a_bad_call_is_refused_at_once(
    client: httpx.AsyncClient, deployment: Any, changed: dict[str, Any], param: str, code: str
) -> None:
    wanted = {"endpoint": CHAT, "completion_window": "24h", "input_file_id": "file_x", **changed}
    answer = await client.post("/v1/batches", json=wanted)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == code
    assert param is None or error["param"] == param


async def test_every_answer_is_one_line_for_every_reader(
    openai_client: AsyncOpenAI, deployment: Any
) -> None:
    """Python's `splitlines` ends lines at characters that JSON leaves as they are."""
    custom_id = "a\u2028b\u2029c\x85d"
    batch = await create(openai_client, line(custom_id))
    await deployment.finish_all()
    done = await openai_client.batches.retrieve(batch.id)
    content = (await openai_client.files.content(done.output_file_id)).text
    assert [json.loads(each)["custom_id"] for each in content.splitlines()] == [custom_id]
