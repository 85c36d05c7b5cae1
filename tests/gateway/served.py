"""The API, a collector and a worker with the null engine, as processes of their own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

START_SECONDS = 120.0


@contextmanager
def process(
    *words: str, stop: int = signal.SIGTERM, **environment: str
) -> Iterator[psutil.Process]:
    """`python -m` these words; ended gracefully by the signal `stop`, with status 0."""
    ours = ("BATTEN_", "DATABASE_URL", "REDIS_URL", "LOG_LEVEL")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    child = subprocess.Popen([sys.executable, "-m", *words], env=kept | environment)
    try:
        yield psutil.Process(child.pid)
    finally:
        child.send_signal(stop)
        assert child.wait(60) == 0


@contextmanager
def served(settings: Any, model: Path, **environment: str) -> Iterator[tuple[int, psutil.Process]]:
    """The API's port and process, once a worker serves the model."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        "BATTEN_ADMIN_KEY": settings.admin_key.get_secret_value(),
        "BATTEN_DATA": str(settings.data),
        "BATTEN_MODEL": str(model),
        "BATTEN_ENGINE": "null",
        "BATTEN_LOG_LEVEL": "ERROR",
        "DATABASE_URL": settings.effective_database_url,
        "REDIS_URL": settings.redis_url.get_secret_value(),
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    with ExitStack() as stack:
        words = ("gateway", "api", "--port", str(port))
        api = stack.enter_context(process(*words, stop=signal.SIGINT, **environment))
        for words in (("gateway", "collector"), ("worker",)):
            stack.enter_context(process(*words, **environment))
        deadline = time.monotonic() + START_SECONDS
        while not _ready(port):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield port, api


def _ready(port: int) -> bool:
    try:
        answer = httpx.get(f"http://127.0.0.1:{port}/readyz")
    except httpx.TransportError:
        return False
    return answer.status_code == 200 and bool(sum((answer.json()["workers"] or {}).values()))
