"""A whole system of real processes, with wires, clocks and servers that can be harmed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from openai import OpenAI
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tests.chaos.databases import Postgres, Rows, Sqlite
from tests.chaos.proxy import Proxy
from tests.chaos.skew import Clocks
from tests.processes import child_of
from tests.servers import RedisServer

LEASE_SECONDS = 4.0
SILENT_SECONDS = 4.0
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


class System:
    """`batten up` with the null engine and two workers."""

    def __init__(self, folder: Path, database: str) -> None:
        self.data = folder / "data"
        self.data.mkdir()
        self.database = Postgres() if database == "postgres" else Sqlite(self.data / "batten.db")
        self.redis = RedisServer()
        self.wire = Proxy(self.redis.port)
        self.clocks = Clocks(folder)
        ours = ("BATTEN_", "DATABASE_URL", "REDIS_URL", "LOG_LEVEL")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        self.environment = {
            **kept,
            **self.clocks.environment,
            "BATTEN_DATA": str(self.data),
            "BATTEN_ENGINE": "null",
            "BATTEN_NULL_DELAY": "0.03",
            "BATTEN_LEASE_SECONDS": str(LEASE_SECONDS),
            "BATTEN_SILENT_SECONDS": str(SILENT_SECONDS),
            "BATTEN_MODEL": str(write_model(folder / "tiny")),
            "OMP_NUM_THREADS": "1",
            "DATABASE_URL": self.database.url,
            "REDIS_URL": self.wire.url,
        }
        self.log = folder / "up.log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gateway", "up", "--port", "0", "--workers", "2"],
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
            timeout=BOUND,
        )
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout.strip()

    def child(self, words: str) -> psutil.Process:
        """The running process with `words` in its command line, waited for."""
        found: psutil.Process = wait_for(lambda: child_of(self.process.pid, words), words)
        return found

    def query(self, sql: str, *values: object) -> Rows:
        return self.database.query(sql, *values)

    def out(self) -> set[str]:
        """Requests that are in the queue or run, as far as SQL knows."""
        rows = self.query("SELECT id FROM requests WHERE state IN ('dispatched', 'running')")
        return {row[0] for row in rows}

    def logs(self) -> str:
        files = sorted((self.data / "logs").glob("*.log"))
        return "\n".join(f"--- {file.name}\n{file.read_text()[-3000:]}" for file in files)

    def close(self) -> None:
        self.wire.heal()
        self.database.heal()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            finally:
                self.process.kill()
        self.wire.close()
        self.redis.close()
        self.database.close()
