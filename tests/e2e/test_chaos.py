"""A batch in a whole system of real processes, killed and flushed while it runs.

The engine is the null one: what is tested is that every line ends once and is billed once.
"""

from __future__ import annotations

import json
import os
import signal
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
from openai import OpenAI
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

LINES = 300
BOUND = 120.0


def wait_for(condition: Callable[[], Any], what: str, bound: float = BOUND) -> Any:
    deadline = time.monotonic() + bound
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)
    return found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 512}')
    tokenizer = Tokenizer(WordLevel({f"w{n}": n for n in range(50)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


class System:
    """`batten up` on a Redis of the test's, so that it can be flushed."""

    def __init__(self, folder: Path, model: Path, redis_url: str) -> None:
        self.data = folder / "data"
        ours = ("BATTEN_", "DATABASE_URL", "REDIS_URL", "LOG_LEVEL")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        self.environment = {
            **kept,
            "BATTEN_DATA": str(self.data),
            "BATTEN_ENGINE": "null",
            "BATTEN_NULL_DELAY": "0.05",
            "BATTEN_MODEL": str(model),
            "OMP_NUM_THREADS": "1",
            "REDIS_URL": redis_url,
        }
        self.log = folder / "up.log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gateway", "up", "--port", "0"],
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def url(self) -> str:
        text = wait_for(
            lambda: (said := self.log.read_text()) and "is ready" in said and said, "the system"
        )
        return next(word.rstrip(";,.") for word in text.split() if word.startswith("http://"))

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

    def child(self, words: str) -> psutil.Process | None:
        for process in psutil.Process(self.process.pid).children():
            try:
                line = " ".join(process.cmdline())
            except psutil.NoSuchProcess:
                continue
            if words in line and "exec_bound.py" not in line:
                return process
        return None

    def kill(self, words: str) -> None:
        process = wait_for(lambda: self.child(words), words)
        process.kill()

    def completed(self) -> int:
        return int(self.query("SELECT SUM(completed) FROM batches")[0][0])

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        with sqlite3.connect(f"file:{self.data / 'batten.db'}?mode=ro", uri=True) as database:
            return database.execute(sql).fetchall()


@pytest.fixture
def system(tmp_path: Path, model: Path, redis_server_url: str) -> Iterator[System]:
    with redis.Redis.from_url(redis_server_url) as server:
        server.flushall()
    system = System(tmp_path, model, redis_server_url)
    yield system
    if system.process.poll() is None:
        system.process.send_signal(signal.SIGTERM)
        try:
            system.process.wait(60)
        finally:
            system.process.kill()


def line(number: int) -> dict[str, Any]:
    """Lengths differ, so that answers come one after another for a while."""
    body = {"model": "tiny", "prompt": "w1 w2 w3", "max_tokens": 10 + number}
    request = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions"}
    return {**request, "body": body}


def test_a_batch_survives_the_loss_of_every_process_and_of_redis(
    system: System, redis_server_url: str
) -> None:
    url = system.url()
    system.batten("tenant", "create", "acme")
    key = system.batten("key", "create", "acme").split()[-1]
    content = "\n".join(json.dumps(line(n)) for n in range(LINES)).encode()
    with OpenAI(api_key=key, base_url=f"{url}/v1", max_retries=10) as client:
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        system.kill("gateway control")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )

        wait_for(lambda: system.completed() > 0, "the first answers")
        system.kill("gateway collector")
        system.kill("gateway api")
        wait_for(lambda: system.completed() > 20, "more answers")
        system.kill("-m worker")
        with redis.Redis.from_url(redis_server_url) as server:
            server.flushall()
        assert system.completed() < LINES - 50
        wait_for(lambda: system.completed() == LINES, "the last answer")
        done = wait_for(
            lambda: (now := client.batches.retrieve(batch.id)).status == "completed" and now,
            "the files",
        )
        output = client.files.content(done.output_file_id).text.splitlines()

    answers = [json.loads(line) for line in output]
    assert [answer["custom_id"] for answer in answers] == [f"c{n}" for n in range(LINES)]
    usages = [answer["response"]["body"]["usage"] for answer in answers]
    billed = system.query(
        "SELECT COUNT(*), SUM(prompt_tokens), SUM(completion_tokens), "
        "COUNT(DISTINCT request_id) FROM usage_records"
    )
    expected = tuple(
        sum(usage[name] for usage in usages) for name in ("prompt_tokens", "completion_tokens")
    )
    assert billed == [(LINES, *expected, LINES)]
    assert (done.usage.input_tokens, done.usage.output_tokens) == expected
    assert system.query("SELECT enqueued_tokens FROM batches") == [(0,)]
    system.batten("audit")
