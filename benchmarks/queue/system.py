"""Real processes with the null engine, and batches for them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from gateway.auth.scope import TenantScope
from gateway.batches.validation import validate_batch
from gateway.files.service import create_output
from gateway.kit.clock import now_ms
from gateway.kit.context import Context
from gateway.kit.ids import new_id
from gateway.kit.tasks import RecordedTasks
from gateway.models import Batch
from gateway.settings import Settings

MODEL = Path(".cache/smollm2-135m-instruct")
WINDOW_MS = 24 * 3_600_000

_COMMANDS = {
    "api": ["gateway", "api"],
    "collector": ["gateway", "collector"],
    "worker": ["worker"],
}

Running = Mapping[str, subprocess.Popen[bytes]]


@contextmanager
def processes(
    settings: Settings, model: Path, names: Sequence[str], **more: str
) -> Iterator[Running]:
    """`more` is added to their environment."""
    assert settings.redis_url is not None
    environment = {
        **os.environ,
        "BATTEN_DATA": str(settings.data),
        "BATTEN_MODEL": str(model.absolute()),
        "BATTEN_MODEL_NAME": "null",
        "BATTEN_ENGINE": "null",
        "BATTEN_LOG_LEVEL": "WARNING",
        "BATTEN_PORT": str(settings.port),
        "DATABASE_URL": settings.effective_database_url,
        "REDIS_URL": settings.redis_url.get_secret_value(),
        "OMP_NUM_THREADS": "1",
        **more,
    }
    running = {
        name: subprocess.Popen([sys.executable, "-m", *_COMMANDS[name]], env=environment)
        for name in names
    }
    try:
        yield running
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait(60)


def check_alive(running: Running) -> None:
    for name, process in running.items():
        assert process.poll() is None, f"{name} ended with {process.returncode}"


async def make_batch(
    context: Context, tenant_id: str, key_id: str, pieces: AsyncIterator[bytes]
) -> str:
    """Waiting to be validated."""
    file = await create_output(context, TenantScope(tenant_id), "in.jsonl", "batch", pieces)
    batch = Batch(
        id=new_id("batch"),
        tenant_id=tenant_id,
        key_id=key_id,
        endpoint="/v1/completions",
        completion_window="24h",
        input_file_id=file.id,
        created_at=now_ms(),
        expires_at=now_ms() + WINDOW_MS,
    )
    async with context.database.write() as session:
        session.add(file)
        await session.flush()
        session.add(batch)
    return batch.id


async def validate(context: Context, batch_id: str) -> None:
    """In this process, so that its memory and its time can be told."""
    tasks = RecordedTasks()
    await validate_batch(context, tasks, batch_id)
    while tasks.sent:
        tasks.sent.clear()
        await validate_batch(context, tasks, batch_id)
