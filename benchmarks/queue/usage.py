"""What a month of usage costs to look at, by sums of hours and by its rows; and to book.

    python -m benchmarks.queue.usage [--database sqlite|postgres] [--rows N] [--models N]
        [--transactions N]

One tenant's month of so many rows, spread over so many models and two classes. A transaction books
500 rows; their number of different sums is what it locks and updates besides.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sqlalchemy import text

from benchmarks.queue.servers import own_database
from gateway.auth.scope import scope_for_background
from gateway.billing.booking import HOUR_MS, book
from gateway.billing.invoice_repository import InvoiceRepository
from gateway.billing.invoices import draft
from gateway.kit.clock import now_ms
from gateway.kit.database import Database, WriteSession
from gateway.kit.ids import new_id
from gateway.kit.months import end_of, month_of, months_later, start_of
from gateway.kit.sql import insert_new
from gateway.models import UsageRecord
from gateway.tenants.service import create_tenant
from gateway.usage.repository import UsageRepository

ROUNDS = 5
AT_ONCE = 500
FILL = 10_000

_INVOICE = """SELECT corrects_id IS NULL, model, request_class, price_id, sum(amount_nano),
count(request_id), sum(prompt_tokens), sum(cached_tokens), sum(completion_tokens)
FROM usage_records WHERE tenant_id = :tenant AND created_at >= :start AND created_at < :end
GROUP BY 1, 2, 3, 4"""
_DAYS = """SELECT created_at - created_at % 86400000 AS day, sum(amount_nano), count(request_id),
sum(prompt_tokens), sum(cached_tokens), sum(completion_tokens)
FROM usage_records WHERE tenant_id = :tenant AND created_at >= :start AND created_at < :end
GROUP BY 1"""

Book = Callable[[WriteSession, Sequence[dict[str, Any]]], Awaitable[Any]]


def row(tenant_id: str, at: int, number: int, models: int) -> dict[str, Any]:
    return {
        "id": new_id("usage"),
        "tenant_id": tenant_id,
        "key_id": "key_1",
        "model": f"model-{number % models}",
        "base_model": "base",
        "adapter_revision_id": f"adrev_{number % models}",
        "request_class": "batch" if number % 3 else "standard",
        "prompt_tokens": 100,
        "cached_tokens": 10,
        "completion_tokens": 50,
        "price_id": "price_default",
        "amount_nano": 30_000,
        "created_at": at,
    }


async def fill(database: Database, tenant_id: str, month: str, rows: int, models: int) -> None:
    start, length = start_of(month), end_of(month) - start_of(month)
    for first in range(0, rows, FILL):
        numbers = range(first, min(first + FILL, rows))
        async with database.write() as session:
            await book(
                session,
                [row(tenant_id, start + each * length // rows, each, models) for each in numbers],
            )
    async with database.engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        for statement in ("ANALYZE usage_records", "ANALYZE usage_hours"):
            await connection.execute(text(statement))


async def look(database: Database, tenant_id: str, month: str) -> None:
    scope, start, end = scope_for_background(tenant_id), start_of(month), end_of(month)
    span = {"tenant": tenant_id, "start": start, "end": end}
    off = 20 * 60_000  # from twenty past to twenty past: both ends from rows

    async with database.read() as session:
        invoices, usage = InvoiceRepository(session, scope), UsageRepository(session, scope)
        await timed("invoice, by rows", lambda: session.execute(text(_INVOICE), span))
        await timed("invoice", lambda: draft(invoices, tenant_id, month))
        await timed("usage by day, by rows", lambda: session.execute(text(_DAYS), span))
        await timed("usage by day", lambda: usage.sums(start, end, "day"))
        await timed("usage by day, off the hour", lambda: usage.sums(start + off, end - off, "day"))
        await timed("usage by model", lambda: usage.sums(start, end, "model"))


async def timed(name: str, work: Callable[[], Awaitable[Any]]) -> None:
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        await work()
        seconds.append(time.perf_counter() - began)
    print(f"{name:<28}{statistics.median(seconds) * 1e3:>10.1f} ms")


async def book_rows(
    database: Database, tenant_id: str, transactions: int, models: int, how: Book
) -> float:
    """Seconds of a transaction."""
    began = time.perf_counter()
    for _ in range(transactions):
        rows = [row(tenant_id, now_ms(), number, models) for number in range(AT_ONCE)]
        async with database.write() as session:
            await how(session, rows)
    return (time.perf_counter() - began) / transactions


async def insert(session: WriteSession, rows: Sequence[dict[str, Any]]) -> None:
    await insert_new(session, UsageRecord, rows)


async def compare(database: Database, tenant_id: str, transactions: int) -> None:
    """Side by side, in turn."""
    for models in (1, 20, AT_ONCE):
        pairs = []
        for _ in range(ROUNDS):
            plain = await book_rows(database, tenant_id, transactions, models, insert)
            pairs.append((plain, await book_rows(database, tenant_id, transactions, models, book)))
        plain, booked = (statistics.median(each) * 1e3 for each in zip(*pairs, strict=True))
        print(
            f"{AT_ONCE} rows of {models} models: insert {plain:.1f} ms, "
            f"with sums {booked:.1f} ms, {(booked - plain) / AT_ONCE * 1e3:.1f} us a row"
        )


async def measure(options: argparse.Namespace, url: str) -> None:
    database = Database(url)
    try:
        async with database.write() as session:
            tenant_id = (await create_tenant(session, "benchmark")).id
        month = months_later(month_of(now_ms()), -1)
        await fill(database, tenant_id, month, options.rows, options.models)
        async with database.read() as session:
            hours = await session.scalar(text("SELECT count(*) FROM usage_hours"))
        hour = (end_of(month) - start_of(month)) // HOUR_MS
        print(f"{options.rows:,} rows, {hours:,} sums of {hour} hours")
        await look(database, tenant_id, month)
        await compare(database, tenant_id, options.transactions)
    finally:
        await database.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="postgres")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--transactions", type=int, default=20)
    options = parser.parse_args()
    with ExitStack() as stack:
        data = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="batten-bench-")))
        url = stack.enter_context(own_database(options.database, data))
        print(f"{options.database}; load average {os.getloadavg()[0]:.1f}")
        asyncio.run(measure(options, url))


if __name__ == "__main__":
    main()
