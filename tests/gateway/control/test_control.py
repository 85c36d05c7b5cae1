"""Control tasks: sweeps find what messages lost; a real Celery worker does the work."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
import pytest
from click.testing import CliRunner, Result
from obstore.exceptions import PermissionDeniedError
from openai import AsyncOpenAI
from redis.asyncio import Redis
from sqlalchemy import update
from structlog.testing import capture_logs

from gateway import heartbeats
from gateway.batches import sweep
from gateway.batches.sweep import sweep_batches
from gateway.cli.root import root
from gateway.control.app import CONTROL, beat, works
from gateway.control.broker import CeleryTasks, celery_tasks, make_celery
from gateway.files import purge
from gateway.files.purge import purge_files, remove_orphans
from gateway.kit import task_names as names
from gateway.kit.clock import now_ms
from gateway.kit.store import read_blob, write_blob
from gateway.kit.tasks import RecordedTasks
from gateway.models import Batch, File
from gateway.settings import Settings

CHAT = "/v1/chat/completions"
LINE = json.dumps(
    {
        "custom_id": "a",
        "method": "POST",
        "url": CHAT,
        "body": {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]},
    }
).encode()


async def create(client: AsyncOpenAI, content: bytes = LINE) -> Any:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h"
    )


async def set_batch(deployment: Any, **values: Any) -> None:
    async with deployment.context.database.write() as session:
        await session.execute(update(Batch).values(**values))


async def test_the_sweep_finds_every_batch_that_nobody_works_on(
    openai_client: AsyncOpenAI, deployment: Any
) -> None:
    batch = await create(openai_client)
    deployment.tasks.sent.clear()
    assert await sweep_batches(deployment.context, deployment.tasks) == 0  # it is new
    assert await sweep_batches(deployment.context, deployment.tasks, silent_ms=0) == 1
    assert deployment.tasks.sent == [(names.VALIDATE, batch.id)]
    await deployment.control()
    assert await sweep_batches(deployment.context, deployment.tasks, silent_ms=0) == 0
    await deployment.work()
    deployment.tasks.sent.clear()
    assert await sweep_batches(deployment.context, deployment.tasks, silent_ms=0) == 1
    assert deployment.tasks.sent == [(names.FINALIZE, batch.id)]
    await deployment.control()
    assert (await openai_client.batches.retrieve(batch.id)).status == "completed"
    assert await sweep_batches(deployment.context, deployment.tasks, silent_ms=0) == 0


async def test_the_sweep_finds_expired_and_cancelling_batches(
    openai_client: AsyncOpenAI, deployment: Any
) -> None:
    batch = await create(openai_client)
    await deployment.control()
    await set_batch(deployment, expires_at=1000)
    assert await sweep_batches(deployment.context, deployment.tasks) == 1
    await deployment.control()
    assert (await openai_client.batches.retrieve(batch.id)).status == "expired"
    other = await create(openai_client)
    await deployment.control()
    await openai_client.batches.cancel(other.id)
    deployment.tasks.sent.clear()
    assert await sweep_batches(deployment.context, deployment.tasks, silent_ms=0) == 1
    await deployment.control()
    assert (await openai_client.batches.retrieve(other.id)).status == "cancelled"


async def test_a_batch_at_work_is_left_alone(openai_client: AsyncOpenAI, deployment: Any) -> None:
    batch = await create(openai_client)
    await set_batch(deployment, created_at=1000)
    async with deployment.context.database.write() as session:
        await heartbeats.touch(session, f"batch:{batch.id}")
    assert await sweep_batches(deployment.context, deployment.tasks) == 0


async def test_the_sweep_takes_those_that_expire_first_and_reads_no_more(
    openai_client: AsyncOpenAI, deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "_AT_ONCE", 2)
    ids = [(await create(openai_client)).id for _ in range(4)]
    async with deployment.context.database.write() as session:
        for place, batch_id in enumerate(reversed(ids)):
            changed = update(Batch).where(Batch.id == batch_id).values(expires_at=place)
            await session.execute(changed)
    deployment.tasks.sent.clear()
    assert await sweep_batches(deployment.context, deployment.tasks, silent_ms=0) == 2
    assert deployment.tasks.sent == [(names.VALIDATE, each) for each in (ids[3], ids[2])]


async def test_a_blob_that_the_store_refuses_to_delete_holds_up_no_other(
    openai_client: AsyncOpenAI, deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [
        await openai_client.files.create(file=("a.jsonl", b"{}"), purpose="batch") for _ in range(4)
    ]
    kept = files.pop()
    for file in files:
        await openai_client.files.delete(file.id)
    really = obstore.delete_async

    async def refused(store: Any, key: str) -> None:
        if key.endswith(files[0].id):
            raise PermissionDeniedError(f"{key} is locked")
        await really(store, key)

    with monkeypatch.context() as patch:
        patch.setattr(obstore, "delete_async", refused)
        patch.setattr(purge, "_AT_ONCE", 1)
        assert [await purge_files(deployment.context) for _ in range(3)] == [1, 1, 0]
        patch.setattr(purge, "SWEEP_SECONDS", 0)
        await openai_client.files.delete(kept.id)
        assert await purge_files(deployment.context) == 0
        patch.setattr(purge, "SWEEP_SECONDS", 60)
        assert await purge_files(deployment.context) == 1
        assert await remove_orphans(deployment.context, timedelta(seconds=-1)) == 0
    assert await purge_files(deployment.context) == 1


async def test_a_file_that_cannot_be_deleted_holds_up_no_other(
    openai_client: AsyncOpenAI, deployment: Any
) -> None:
    """A folder in a file's place is what even root cannot delete as a file."""
    create = openai_client.files.create
    files = [await create(file=("a.jsonl", b"{}"), purpose="batch") for _ in range(3)]
    keys = [f"files/{file.id}" for file in files]
    for file in files:
        await openai_client.files.delete(file.id)
    context = deployment.context
    stuck = Path(context.settings.effective_store.removeprefix("file://")) / keys[0]
    stuck.unlink()
    stuck.mkdir()
    with capture_logs() as logged:
        assert await purge_files(context) == 2
    (said,) = [line for line in logged if line["event"] == "blob_not_deleted"]
    assert said["key"] == keys[0]
    assert said["error"].endswith("Is a directory (os error 21)")
    assert await obstore.list(context.store).collect_async() == []
    stuck.rmdir()
    assert await purge_files(context) == 1


async def test_blobs_of_deleted_files_go_when_no_batch_reads_them(
    openai_client: AsyncOpenAI, deployment: Any
) -> None:
    batch = await create(openai_client)
    await openai_client.files.delete(batch.input_file_id)
    assert await purge_files(deployment.context) == 0
    await deployment.finish_all()
    assert await purge_files(deployment.context) == 1
    assert await purge_files(deployment.context) == 0
    async with deployment.context.database.read() as session:
        file = await session.get_one(File, batch.input_file_id)
    with pytest.raises(FileNotFoundError):
        async for _ in read_blob(deployment.context.store, file.store_key):
            pass


async def test_blobs_without_a_row_go_after_a_day(
    openai_client: AsyncOpenAI, deployment: Any
) -> None:
    await create(openai_client)

    async def chunks() -> Any:
        yield b"left by a crash"

    await write_blob(deployment.context.store, "files/file_lost", chunks())
    assert await remove_orphans(deployment.context) == 0
    assert await remove_orphans(deployment.context, timedelta(seconds=-1)) == 1
    await deployment.finish_all()
    done = (await openai_client.batches.list()).data[0]
    assert done.status == "completed"


async def test_every_task_has_work_and_a_name_in_the_schedule(settings: Settings) -> None:
    named = {value for name, value in vars(names).items() if name.isupper()}
    assert named == set(works(RecordedTasks()))


async def test_the_heartbeat_is_a_row(deployment: Any) -> None:
    await beat(deployment.context)
    async with deployment.context.database.read() as session:
        first = await heartbeats.last(session, CONTROL)
    assert first is not None
    await beat(deployment.context)
    async with deployment.context.database.read() as session:
        assert (await heartbeats.last(session, CONTROL) or 0) >= first


async def test_the_check_of_control_sees_consumption(
    settings: Settings, deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check() -> Result:
        environment = {"DATABASE_URL": settings.effective_database_url}
        return CliRunner().invoke(root, ["control", "--check"], env=environment)

    never = await asyncio.to_thread(check)
    assert "was ever consumed" in never.output
    await beat(deployment.context)
    lately = await asyncio.to_thread(check)
    assert (lately.exit_code, lately.output) == (0, "a control task was consumed 0 s ago\n")
    now = now_ms()
    monkeypatch.setattr("gateway.control.liveness.now_ms", lambda: now + 61_000)
    long_ago = await asyncio.to_thread(check)
    assert "was consumed for 61 s" in long_ago.output
    assert (never.exit_code, long_ago.exit_code) == (1, 1)


async def test_a_broker_that_is_down_costs_a_sender_little(settings: Settings) -> None:
    down = settings.model_copy(
        update={"redis_url": Settings(redis_url="redis://127.0.0.1:1/0").redis_url}
    )
    tasks = celery_tasks(down)
    began = time.monotonic()
    for _ in range(20):
        await tasks.send(names.VALIDATE, "batch_x")
    assert time.monotonic() - began < 5


async def test_keys_of_celery_have_their_own_prefix(settings: Settings, redis_url: str) -> None:
    app = make_celery(settings)
    await CeleryTasks(app).send(names.VALIDATE, "batch_x")
    app.close()
    async with Redis.from_url(redis_url) as client:
        keys = [key async for key in client.scan_iter()]
    assert keys
    assert all(key.startswith(b"batten:celery:") for key in keys)


async def test_a_real_control_process_validates_and_finalises(
    settings: Settings, openai_client: AsyncOpenAI, deployment: Any, tmp_path: Path
) -> None:
    code = (
        "from gateway.settings import Settings\n"
        "from gateway.control.run import run_control\n"
        "run_control(Settings())\n"
    )
    environment = {
        **os.environ,
        "DATABASE_URL": settings.effective_database_url,
        "REDIS_URL": settings.redis_url.get_secret_value() if settings.redis_url else "",
        "BATTEN_DATA": str(tmp_path),
    }
    with (tmp_path / "control.log").open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, env=environment, stdout=output, stderr=output
        )
    try:
        batch = await create(openai_client)
        tasks = celery_tasks(settings)
        await tasks.send(names.VALIDATE, batch.id)
        await _until(lambda: _has_status(openai_client, batch.id, "in_progress"))
        await deployment.work()
        [(name, batch_id)] = [sent for sent in deployment.tasks.sent if sent[0] == names.FINALIZE]
        await tasks.send(name, batch_id)
        await _until(lambda: _has_status(openai_client, batch.id, "completed"))
        await _until(lambda: _has_beaten(deployment))
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 20) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert list(tmp_path.glob("beat-schedule*"))  # noqa: ASYNC240


async def _has_status(client: AsyncOpenAI, batch_id: str, status: str) -> bool:
    return (await client.batches.retrieve(batch_id)).status == status


async def _has_beaten(deployment: Any) -> bool:
    async with deployment.context.database.read() as session:
        return await heartbeats.last(session, CONTROL) is not None


async def _until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(45):
        while not await holds():  # noqa: ASYNC110  another process is waited for
            await asyncio.sleep(0.1)
