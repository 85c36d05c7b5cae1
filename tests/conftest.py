"""Real servers for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.s3 import S3Server
from tests.servers import PostgresServer, RedisServer

# Triton reads this once, when it is imported: without a GPU, its kernels are interpreted.
if not [*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("kfd")]:
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def postgres_directory() -> Iterator[Path]:
    """A running server's socket directory; its superuser is `postgres`, without a password."""
    server = PostgresServer(["synchronous_commit=off"])
    yield server.home
    server.close()


@pytest.fixture(scope="session")
def redis_server_url() -> Iterator[str]:
    server = RedisServer()
    yield server.url
    server.close()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """Shared, so leave it running."""
    server = S3Server()
    server.start()
    yield server
    server.close()
