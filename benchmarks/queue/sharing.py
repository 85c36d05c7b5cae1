"""How real tenants share a real system: fairness, and latency beside a full batch load.

    python -m benchmarks.queue.sharing [--lines N] [--delay SECONDS] [--database sqlite|postgres]

The processes are real (API, collector, one worker); the engine is the null one, whose steps take
`--delay`. What is counted is what is billed: tokens of the prompt once, of the output twice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
from sqlalchemy import func, select

from benchmarks.queue import system
from benchmarks.queue.servers import own_database, own_redis
from gateway.adapters.base_models import register_base_model
from gateway.kit.context import Context, open_context
from gateway.models import Batch, UsageRecord
from gateway.settings import Settings
from gateway.tenants.service import create_key, create_tenant

OUTPUT_TOKENS = 16
OUTPUT_PRICE = 2
SEQUENCES = 32
CALLS = 60
BOUND = 1_200.0


@dataclass(frozen=True)
class Customer:
    name: str
    id: str
    key_id: str
    secret: str


async def customer(context: Context, name: str, weight: float = 1.0) -> Customer:
    async with context.database.write() as session:
        tenant = await create_tenant(session, name, weight)
        key = await create_key(session, tenant.id, name)
    return Customer(name, tenant.id, key.key.id, key.secret)


async def pieces(lines: int, words: int) -> AsyncIterator[bytes]:
    for number in range(lines):
        prompt = f"{number} " + "kettle " * words
        body = {"model": "null", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
        line = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": body}
        yield json.dumps(line).encode() + b"\n"


async def batch_of(context: Context, owner: Customer, lines: int, words: int = 20) -> str:
    batch_id = await system.make_batch(context, owner.id, owner.key_id, pieces(lines, words))
    await system.validate(context, batch_id)
    return batch_id


async def served(context: Context, owner: Customer) -> int:
    tokens = UsageRecord.prompt_tokens + OUTPUT_PRICE * UsageRecord.completion_tokens
    async with context.database.read() as session:
        total = select(func.sum(tokens)).where(UsageRecord.tenant_id == owner.id)
        return int(await session.scalar(total) or 0)


async def completed(context: Context, batch_id: str) -> int:
    async with context.database.read() as session:
        return await session.scalar(select(Batch.completed).where(Batch.id == batch_id)) or 0


async def until(context: Context, batch_id: str, count: int, running: system.Running) -> None:
    deadline = time.monotonic() + BOUND
    while await completed(context, batch_id) < count:
        assert time.monotonic() < deadline, f"{batch_id} does not come to {count}"
        system.check_alive(running)
        await asyncio.sleep(0.02)


async def late_and_small(context: Context, running: system.Running, lines: int) -> None:
    """B comes with 10 lines, alone and then behind A's many; then calls, idle and beside them."""
    a, b = await customer(context, "a"), await customer(context, "b")
    await until_ready(context, b)

    async def ten() -> float:
        batch_id = await batch_of(context, b, 10)
        began = time.perf_counter()
        await until(context, batch_id, 10, running)
        return time.perf_counter() - began

    idle, alone = await calls(context, b), min([await ten() for _ in range(3)])
    many = await batch_of(context, a, lines)
    await until(context, many, 4 * SEQUENCES, running)
    behind = await ten()
    done = await completed(context, many)
    print(
        f"A {lines:,} lines, then B 10: B takes {behind:.2f} s, alone {alone:.2f} s "
        f"({behind / alone:.1f} times); A has {done:,} answers then"
    )
    loaded = await calls(context, b)
    assert await completed(context, many) < lines, "A's lines ended meanwhile: give more"
    for name, at in (("p50", 0.5), ("p95", 0.95)):
        one, other = quantile(idle, at), quantile(loaded, at)
        print(
            f"interactive call of {OUTPUT_TOKENS} tokens, {name}: idle {one * 1e3:.0f} ms, "
            f"beside a full batch load {other * 1e3:.0f} ms ({other / one:.1f} times)"
        )


async def shares(
    context: Context, running: system.Running, a: Customer, b: Customer, batches: tuple[str, str]
) -> str:
    """Of the tokens, when one of the two has little left."""
    totals = [await total_of(context, each) for each in batches]
    deadline = time.monotonic() + BOUND
    while True:
        done = [await completed(context, each) for each in batches]
        if any(count > 0.8 * total for count, total in zip(done, totals, strict=True)):
            break
        assert time.monotonic() < deadline, f"no end: {done} of {totals}"
        system.check_alive(running)
        await asyncio.sleep(0.05)
    first, second = await served(context, a), await served(context, b)
    return (
        f"B has {second / (first + second):.1%} of the tokens ({done[0]:,} and {done[1]:,} "
        f"answers; A {first:,} and B {second:,} tokens)"
    )


async def total_of(context: Context, batch_id: str) -> int:
    async with context.database.read() as session:
        return await session.scalar(select(Batch.total).where(Batch.id == batch_id)) or 0


def quantile(times: list[float], at: float) -> float:
    return statistics.quantiles(times, n=100)[round(at * 100) - 1]


async def until_ready(context: Context, of: Customer) -> None:
    """The API answers a call, so a worker is up as well."""
    url = f"http://127.0.0.1:{context.settings.port}/v1/completions"
    body = {"model": "null", "prompt": "hello", "max_tokens": 1}
    headers = {"authorization": f"Bearer {of.secret}"}
    deadline = time.monotonic() + 120
    async with httpx.AsyncClient(headers=headers, timeout=120) as client:
        while True:
            try:
                if (await client.post(url, json=body)).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            assert time.monotonic() < deadline, "the API does not answer"
            await asyncio.sleep(0.2)


async def calls(context: Context, of: Customer) -> list[float]:
    """Seconds of interactive calls, one after another."""
    url = f"http://127.0.0.1:{context.settings.port}/v1/completions"
    body = {"model": "null", "prompt": "hello", "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    headers = {"authorization": f"Bearer {of.secret}"}
    times = []
    async with httpx.AsyncClient(headers=headers, timeout=120) as client:
        for _ in range(CALLS):
            began = time.perf_counter()
            answer = await client.post(url, json=body)
            assert answer.status_code == 200, answer.text
            times.append(time.perf_counter() - began)
    return times


async def measure(case: str, options: argparse.Namespace, settings: Settings) -> None:
    delay, names = str(options.delay), ("api", "collector", "worker")
    more = {"BATTEN_NULL_DELAY": delay, "BATTEN_MAX_SEQUENCES": str(SEQUENCES)}
    async with open_context(settings) as context:
        async with context.database.write() as session:
            await register_base_model(session, "null", str(options.model.absolute()))
        if case == "late":
            with system.processes(settings, options.model, names, **more) as running:
                await late_and_small(context, running, options.lines)
            return
        weight, words = (3.0, 20) if case == "weights" else (1.0, 200)
        a, b = await customer(context, "a"), await customer(context, "b", weight)
        mine = await batch_of(context, a, options.backlog)
        theirs = await batch_of(context, b, options.backlog, words)
        with system.processes(settings, options.model, names[1:], **more) as running:
            told = await shares(context, running, a, b, (mine, theirs))
        print(f"both wait, {CASES[case]}: {told}")


CASES = {
    "late": "B late and small",
    "weights": "weights 1 : 3",
    "prompts": "B's prompts 10 times as long",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="postgres")
    parser.add_argument("--lines", type=int, default=50_000)
    parser.add_argument("--backlog", type=int, default=3_000)
    parser.add_argument("--delay", type=float, default=0.01)
    parser.add_argument("--model", type=Path, default=system.MODEL)
    parser.add_argument("--case", choices=list(CASES), action="append")
    options = parser.parse_args()
    print(
        f"{options.database}, steps of {options.delay * 1e3:.0f} ms, {SEQUENCES} at once, "
        f"{OUTPUT_TOKENS} tokens an answer; load average {os.getloadavg()[0]:.1f}"
    )
    for case in options.case or CASES:
        with ExitStack() as stack:
            data = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="batten-bench-")))
            url = stack.enter_context(own_database(options.database, data))
            settings = Settings(
                data=data,
                database_url=url,
                redis_url=stack.enter_context(own_redis()),
                port=free_port(),
            )
            asyncio.run(measure(case, options, settings))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


if __name__ == "__main__":
    main()
