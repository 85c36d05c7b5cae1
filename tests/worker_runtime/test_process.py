"""`python -m worker` as a process, with the null engine and a real Redis."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from worker.protocol.messages import Finished
from worker.queue.redis import RedisEventStream, RedisQueue, connect

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that the null engine can serve."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    vocabulary = {f"w{number}": number for number in range(50)}
    Tokenizer(WordLevel(vocabulary, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def begin(*options: str, cwd: Path | None = None, **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "worker", *options],
            cwd=cwd,
            env={**os.environ, "BATTEN_DATA": str(tmp_path / "data"), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def refused(process: subprocess.Popen[str]) -> str:
    """What a worker that cannot start says: one line, and status 1."""
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    (line,) = output.strip().splitlines()
    return line


def test_serves_until_it_is_told_to_stop(
    start: Start, model: Path, redis_server_url: str, make_request
) -> None:
    process = start("--engine", "null", "--model", str(model), REDIS_URL=redis_server_url)

    async def serve() -> None:
        client = connect(redis_server_url)
        await client.flushall()
        queue = RedisQueue(client, "tiny")
        await queue.enqueue([make_request(model="tiny")])
        entries = []
        events = RedisEventStream(client, "tiny")
        while not any(isinstance(entry.event, Finished) for entry in entries):
            entries += await events.read("c", 10, 5.0)
        await client.aclose()

    asyncio.run(asyncio.wait_for(serve(), 60))
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output
    names = [json.loads(line)["event"] for line in output.splitlines()]
    assert names[0] == "worker_ready"
    assert names[-1] == "worker_stopped"


def test_a_folder_that_does_not_exist(start: Start, redis_server_url: str) -> None:
    line = refused(start("--model", "/no/such/model", REDIS_URL=redis_server_url))
    assert line.startswith("Error: no such folder: /no/such/model; --model (BATTEN_MODEL) must")


def test_a_folder_without_a_model(start: Start, redis_server_url: str, tmp_path: Path) -> None:
    line = refused(start("--model", str(tmp_path), REDIS_URL=redis_server_url))
    assert "holds no config.json" in line


def test_redis_that_does_not_answer(start: Start, model: Path) -> None:
    line = refused(start("--model", str(model), REDIS_URL="redis://127.0.0.1:1/0"))
    assert "127.0.0.1:1" in line
    assert "REDIS_URL" in line


def test_another_package_named_kernels(
    start: Start, model: Path, redis_server_url: str, tmp_path: Path
) -> None:
    (tmp_path / "kernels.py").touch()
    process = start("--model", str(model), REDIS_URL=redis_server_url, cwd=tmp_path)
    assert "another package of that name" in refused(process)


@pytest.mark.parametrize("missing", ["model", "redis"])
def test_what_has_no_default_is_asked_for(start: Start, missing: str, model: Path) -> None:
    given = {"model": ["--redis", "redis://127.0.0.1/0"], "redis": ["--model", str(model)]}
    process = start(*given[missing], REDIS_URL="", BATTEN_MODEL="")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"no {'queue' if missing == 'redis' else 'model'}: give --{missing}" in output
