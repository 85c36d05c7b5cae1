"""A real control process delivers, and is killed while it does."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.settings import Settings
from tests.gateway.webhooks import conftest as receivers
from tests.gateway.webhooks.conftest import Hooks, Receiver

BOUND = 90.0
CONTROL = (
    "from gateway.settings import Settings\n"
    "from gateway.control.run import run_control\n"
    "run_control(Settings())\n"
)


@asynccontextmanager
async def control(settings: Settings, log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Killed at the end, with its pool."""
    environment = {
        **os.environ,
        "DATABASE_URL": settings.effective_database_url,
        "REDIS_URL": settings.redis_url.get_secret_value() if settings.redis_url else "",
        "BATTEN_DATA": str(settings.data),
        "BATTEN_WEBHOOK_ALLOW_PRIVATE": "1",
        "BATTEN_WEBHOOK_TIMEOUT_SECONDS": "25",
    }
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CONTROL, env=environment, stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_what_a_killed_process_had_sent_is_sent_again(
    hooks: Hooks, receiver: Receiver, settings: Settings, tmp_path: Path
) -> None:
    """Nobody tells the process of the event: its sweep finds it."""
    receiver.answers["/hook"] = receivers.hang
    await hooks.add(receiver.url("/hook"))
    event_id = await hooks.tell()
    log = tmp_path / "control.log"
    async with control(settings, log):
        await receivers.until(lambda: len(receiver.received) == 1, BOUND)
    sent = await hooks.delivery(event_id)
    assert (sent["status"], sent["attempts"]) == ("pending", [])
    receiver.answers.clear()
    await hooks.time_passes()  # its lease is over
    async with control(settings, log), asyncio.timeout(BOUND):
        while (done := await hooks.delivery(event_id))["status"] != "delivered":  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert [each["number"] for each in done["attempts"]] == [2]
    first, second = receiver.received
    assert (first.id, first.body) == (second.id, second.body)
    assert first.id == event_id
    assert "whsec_" not in log.read_text()
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_process_that_is_to_stop_waits_a_little_for_receivers(
    hooks: Hooks, receiver: Receiver, settings: Settings, tmp_path: Path
) -> None:
    receiver.answers["/hook"] = receivers.hang
    await hooks.add(receiver.url("/hook"))
    event_id = await hooks.tell()
    async with control(settings, tmp_path / "control.log") as process:
        await receivers.until(lambda: len(receiver.received) == 1, BOUND)
        process.terminate()
        assert await asyncio.wait_for(process.wait(), BOUND) == 0
    assert (await hooks.delivery(event_id))["attempts"] == []  # its lease brings it back
