"""How fast a batch passes through everything but the model.

    python -m benchmarks.queue.delivery [--database sqlite|postgres] [--lines N] [--bytes N]
        [--max-tokens N] [--model FOLDER] [--validate-only]

Servers, a collector and a worker with the null engine are real processes, started for the run;
validation runs in this one, so that its memory can be told.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
from sqlalchemy import select

from benchmarks.queue import system
from benchmarks.queue.servers import own_database, own_redis
from gateway.adapters.base_models import register_base_model
from gateway.batches.finaliser import finalize_batch
from gateway.kit.context import Context, open_context
from gateway.models import Batch
from gateway.settings import Settings
from gateway.tenants.service import create_key, create_tenant

WORDS = "the kettle arrived broken and order number was never answered by your support team "
BOUND = 600.0


def line(number: int, size: int, max_tokens: int) -> bytes:
    """About `size` bytes; no two lines share a text."""
    content = f"{number} " + WORDS * (1 + size // len(WORDS))
    request = {
        "custom_id": f"c{number}",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "null", "prompt": "", "max_tokens": max_tokens},
    }
    room = max(20, size - len(json.dumps(request)) - 1)
    request["body"]["prompt"] = content[:room]  # type: ignore[index]
    return json.dumps(request).encode() + b"\n"


async def pieces(lines: int, size: int, max_tokens: int) -> AsyncIterator[bytes]:
    for start in range(0, lines, 100):
        numbers = range(start, min(start + 100, lines))
        yield b"".join(line(number, size, max_tokens) for number in numbers)


async def make_batch(context: Context, options: argparse.Namespace) -> str:
    async with context.database.write() as session:
        await register_base_model(session, "null", str(options.model.absolute()))
        tenant = await create_tenant(session, "benchmark")
        key = await create_key(session, tenant.id, "benchmark")
    chunks = pieces(options.lines, options.bytes, options.max_tokens)
    return await system.make_batch(context, tenant.id, key.key.id, chunks)


async def validate(context: Context, batch_id: str) -> None:
    """Prints seconds and the growth of this process's peak memory."""
    before = await status_of(context, batch_id)
    start = psutil.Process().memory_info().rss
    began = time.perf_counter()
    await system.validate(context, batch_id)
    seconds = time.perf_counter() - began
    batch = await status_of(context, batch_id)
    assert batch.status == "in_progress", (before.status, batch.status, batch.errors)
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - start
    print(
        f"validate, tokenise and expand {batch.total:,} lines: {seconds:.1f} s, "
        f"{batch.total / seconds:,.0f} lines/s; peak memory grew by {growth / 2**20:.0f} MiB"
    )


async def status_of(context: Context, batch_id: str) -> Batch:
    async with context.database.read() as session:
        return (await session.scalars(select(Batch).where(Batch.id == batch_id))).one()


async def deliver(context: Context, batch_id: str, settings: Settings, model: Path) -> None:
    """Prints the rate from the first answer counted to the last."""
    with system.processes(settings, model, ("collector", "worker")) as running:
        batch = await status_of(context, batch_id)
        while not batch.completed:
            await _next(running)
            batch = await status_of(context, batch_id)
        began, first, before = time.perf_counter(), batch.completed, cpu_seconds()
        while batch.completed < batch.total and time.perf_counter() - began < BOUND:
            await _next(running)
            batch = await status_of(context, batch_id)
        seconds = time.perf_counter() - began
        assert batch.completed == batch.total, (batch.completed, batch.failed, batch.total)
        rate = (batch.total - first) / seconds
        print(f"end to end, {batch.total:,} lines: {rate:,.0f} lines/s ({seconds:.1f} s)")
        for name, spent in cpu_seconds().items():
            each = (spent - before.get(name, 0.0)) / (batch.total - first)
            print(f"    {name}: {each * 1e6:,.0f} us of CPU a line")
    began = time.perf_counter()
    await finalize_batch(context, batch_id)
    print(f"write the output file: {time.perf_counter() - began:.1f} s")


def cpu_seconds() -> dict[str, float]:
    """Of this process's children by what they run, theirs included."""
    seconds: Counter[str] = Counter()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            words, times = " ".join(process.cmdline()), process.cpu_times()
            kinds = ("collector", "worker", "redis", "postgres")
            kind = next((kind for kind in kinds if kind in words), "other")
            seconds[kind] += times.user + times.system + times.children_user + times.children_system
    return dict(seconds)


async def _next(running: system.Running) -> None:
    await asyncio.sleep(0.05)
    system.check_alive(running)


async def measure(options: argparse.Namespace, settings: Settings) -> None:
    async with open_context(settings) as context:
        batch_id = await make_batch(context, options)
        await context.prompts.of(str(options.model.absolute()))
        await validate(context, batch_id)
        if not options.validate_only:
            await deliver(context, batch_id, settings, options.model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="postgres")
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--bytes", type=int, default=300)
    parser.add_argument("--max-tokens", type=int, default=4)
    parser.add_argument("--model", type=Path, default=system.MODEL)
    parser.add_argument("--validate-only", action="store_true")
    options = parser.parse_args()
    with ExitStack() as stack:
        data = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="batten-bench-")))
        url = stack.enter_context(own_database(options.database, data))
        redis_url = stack.enter_context(own_redis())
        print(
            f"{options.database}, {options.lines:,} lines of about {options.bytes} bytes, "
            f"{options.max_tokens} tokens each; load average {os.getloadavg()[0]:.1f}"
        )
        asyncio.run(measure(options, Settings(data=data, database_url=url, redis_url=redis_url)))


if __name__ == "__main__":
    main()
