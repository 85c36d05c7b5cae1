"""How many jobs a second one API process takes, and how long each call is.

    python -m benchmarks.queue.submit [--database sqlite|postgres] [--jobs N] [--at-once N]

No worker is up: jobs are written to SQL and to the queue, and wait there.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import httpx

from benchmarks.queue import system
from benchmarks.queue.servers import own_database, own_redis
from benchmarks.queue.sharing import Customer, customer, free_port, quantile
from gateway.adapters.base_models import register_base_model
from gateway.kit.context import open_context
from gateway.settings import Settings

BODY = {"model": "null", "prompt": "The kettle arrived broken.", "max_tokens": 16}
JOB = {"endpoint": "/v1/completions", "body": BODY}


async def submit(settings: Settings, of: Customer, jobs: int, at_once: int) -> list[float]:
    """Seconds of each call."""
    base = f"http://127.0.0.1:{settings.port}"
    headers = {"authorization": f"Bearer {of.secret}"}
    times: list[float] = []
    left = iter(range(jobs))

    async def some(client: httpx.AsyncClient) -> None:
        for _ in left:
            began = time.perf_counter()
            answer = await client.post("/v1/jobs", json=JOB)
            times.append(time.perf_counter() - began)
            assert answer.status_code == 202, answer.text

    async with httpx.AsyncClient(base_url=base, headers=headers, timeout=60) as client:
        await asyncio.gather(*(some(client) for _ in range(at_once)))
    return times


async def until_up(settings: Settings) -> None:
    deadline = time.monotonic() + 120
    async with httpx.AsyncClient() as client:
        while True:
            try:
                await client.get(f"http://127.0.0.1:{settings.port}/healthz")
                return
            except httpx.TransportError:
                assert time.monotonic() < deadline, "the API does not answer"
                await asyncio.sleep(0.2)


async def measure(options: argparse.Namespace, settings: Settings) -> None:
    async with open_context(settings) as context:
        async with context.database.write() as session:
            await register_base_model(session, "null", str(options.model.absolute()))
        owner = await customer(context, "benchmark")
        with system.processes(settings, options.model, ("api",)):
            await until_up(settings)
            await submit(settings, owner, 50, 1)
            for at_once in (1, options.at_once):
                began = time.perf_counter()
                times = await submit(settings, owner, options.jobs, at_once)
                rate = options.jobs / (time.perf_counter() - began)
                p50, p99 = quantile(times, 0.5) * 1e3, quantile(times, 0.99) * 1e3
                print(
                    f"POST /v1/jobs, {at_once} at once: {rate:,.0f} jobs/s, p50 {p50:.1f} ms, "
                    f"p99 {p99:.1f} ms"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="postgres")
    parser.add_argument("--jobs", type=int, default=1_000)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--model", type=Path, default=system.MODEL)
    options = parser.parse_args()
    with ExitStack() as stack:
        data = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="batten-bench-")))
        url = stack.enter_context(own_database(options.database, data))
        print(f"{options.database}; load average {os.getloadavg()[0]:.1f}")
        settings = Settings(
            data=data,
            database_url=url,
            redis_url=stack.enter_context(own_redis()),
            port=free_port(),
        )
        asyncio.run(measure(options, settings))


if __name__ == "__main__":
    main()
