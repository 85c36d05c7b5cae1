"""How long a client waits for its first token, beside the engine's own time for it.

    python -m benchmarks.queue.first_token [--database sqlite|postgres] [--calls N]
        [--engine null|hf] [--step SECONDS] [--model FOLDER]

An API, a collector and one idle worker are real processes, started for the run; a call comes when
the one before it has been recorded. The first chunk of a chat comes with the first token, also
where that is half a character. The engine's time, from the moment it was handed the request to
its first token, is read from the worker's metrics after each call.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from benchmarks.queue.servers import own_database, own_redis
from gateway.kit.context import open_context
from gateway.settings import Settings
from gateway.tenants.service import create_key, create_tenant

MODEL = Path(".cache/smollm2-135m-instruct")
PROMPT = "The kettle arrived broken. Write one sentence to the customer."
START_SECONDS = 120.0
SETTLE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class System:
    """Addresses of the API and of the worker's metrics, and the processes by name."""

    api: str
    metrics: str
    processes: dict[str, psutil.Process]

    def cpu_seconds(self) -> dict[str, float]:
        times = {name: process.cpu_times() for name, process in self.processes.items()}
        return {name: each.user + each.system for name, each in times.items()}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def system(settings: Settings, options: argparse.Namespace) -> Iterator[System]:
    assert settings.redis_url is not None
    api, metrics = free_port(), free_port()
    environment = {
        **os.environ,
        "BATTEN_DATA": str(settings.data),
        "BATTEN_MODEL": str(options.model.absolute()),
        "BATTEN_MODEL_NAME": "model",
        "BATTEN_ENGINE": options.engine,
        "BATTEN_NULL_DELAY": str(options.step),
        "BATTEN_METRICS_PORT": str(metrics),
        "BATTEN_LOG_LEVEL": "WARNING",
        "DATABASE_URL": settings.effective_database_url,
        "REDIS_URL": settings.redis_url.get_secret_value(),
    }
    commands = {
        "api": ["gateway", "api", "--port", str(api)],
        "collector": ["gateway", "collector"],
        "worker": ["worker"],
    }
    running = {
        name: subprocess.Popen([sys.executable, "-m", *words], env=environment)
        for name, words in commands.items()
    }
    processes = {name: psutil.Process(process.pid) for name, process in running.items()}
    try:
        yield System(f"http://127.0.0.1:{api}", f"http://127.0.0.1:{metrics}/metrics", processes)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait(60)


def wait_until_served(url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            if (httpx.get(f"{url}/readyz").json()["workers"] or {}).get("model"):
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"nothing serves the model after {START_SECONDS:.0f} s")


async def make_key(settings: Settings) -> str:
    async with open_context(settings) as context, context.database.write() as session:
        tenant = await create_tenant(session, "benchmark")
        return (await create_key(session, tenant.id, "benchmark")).secret


def engine_seconds(http: httpx.Client, metrics: str) -> float:
    """Of all requests so far: until their first token."""
    text = http.get(metrics).text
    phases = re.findall(r'request_seconds_sum\{.*phase="(queue|prefill)".*\} (\S+)', text)
    return sum(float(seconds) for _, seconds in phases)


def first_token(http: httpx.Client, url: str, number: int) -> float:
    """Seconds from sending the request to the first chunk."""
    messages = [{"role": "user", "content": f"{number} {PROMPT}"}]
    body = {"model": "model", "messages": messages, "max_tokens": 4, "stream": True}
    began = time.perf_counter()
    first = None
    with http.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line and first is None:
                first = time.perf_counter() - began
    assert first is not None
    return first


def measure(system: System, key: str, calls: int) -> None:
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(headers=headers, timeout=60) as http:
        for number in range(5):
            first_token(http, system.api, number)
        seen, own = [], []
        used = system.cpu_seconds()
        before = engine_seconds(http, system.metrics)
        for number in range(calls):
            time.sleep(SETTLE_SECONDS)
            seen.append(first_token(http, system.api, 1000 + number))
            after = engine_seconds(http, system.metrics)
            own.append(after - before)
            before = after
    busy = {name: 1000 * (end - used[name]) / calls for name, end in system.cpu_seconds().items()}
    added = [client - engine for client, engine in zip(seen, own, strict=True)]
    for name, values in (("client", seen), ("engine", own), ("added", added)):
        low, middle, high = (1000 * _percentile(values, part) for part in (10, 50, 95))
        print(f"{name:8} p10 {low:7.1f} ms   p50 {middle:7.1f} ms   p95 {high:7.1f} ms")
    print("CPU a call: " + ", ".join(f"{name} {ms:.1f} ms" for name, ms in busy.items()))


def _percentile(values: list[float], part: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[part - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="sqlite")
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--engine", choices=["null", "hf"], default="null")
    parser.add_argument("--step", type=float, default=0.02, help="seconds of the null engine's")
    parser.add_argument("--model", type=Path, default=MODEL)
    options = parser.parse_args()
    with ExitStack() as stack:
        data = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="batten-bench-")))
        url = stack.enter_context(own_database(options.database, data))
        settings = Settings(data=data, database_url=url, redis_url=stack.enter_context(own_redis()))
        key = asyncio.run(make_key(settings))
        running = stack.enter_context(system(settings, options))
        wait_until_served(running.api)
        print(f"{options.database}, {options.engine}; load average {os.getloadavg()[0]:.1f}")
        measure(running, key, options.calls)


if __name__ == "__main__":
    main()
