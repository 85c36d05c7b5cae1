"""The billing invariant: for every batch and job,

    Σ usage rows  =  Σ the batch's counters  =  Σ usage inside what was delivered,

each completed request is metered exactly once, at its pinned price, and nothing else is. An account
holds Σ reservations of the tenant's open requests and Σ usage of its month; so does an invoice.
Invoices are made of sums of hours, each Σ usage rows of its hour.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
from obstore.store import ObjectStore

from gateway.billing.audit_repository import AuditRepository, Tokens
from gateway.billing.invoices import cents
from gateway.billing.service import amount_nano
from gateway.billing.storage import storage_nano
from gateway.kit.database import Database, repeatable
from gateway.kit.store import read_blob
from gateway.models import File
from gateway.settings import Settings
from worker.protocol.object_store import open_store


@dataclass(frozen=True, slots=True)
class Violation:
    subject: str
    message: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.message}"


def run_audit(settings: Settings) -> list[str]:
    """For the command line: needs the database and the store, not Redis."""

    async def run() -> list[str]:
        database = Database(settings.effective_database_url)
        try:
            store = open_store(settings.effective_store, settings.store_seconds)
            found = await audit(database, store)
        finally:
            await database.close()
        return [str(violation) for violation in found]

    return asyncio.run(run())


async def audit(database: Database, store: ObjectStore) -> list[Violation]:
    """Every violation; [] when each token is accounted for once."""
    async with database.read() as session:
        await repeatable(session)
        repository = AuditRepository(session)
        return [
            *[Violation(id_, "completed but not metered") for id_ in await repository.unmetered()],
            *[
                Violation(id_, f"meters a request that is {state}, or not as it was submitted")
                for id_, state in await repository.wrongly_metered()
            ],
            *await _check_accounts(repository),
            *await _check_records(repository),
            *await _check_batches(repository),
            *await _check_outputs(repository, store),
            *await _check_invoices(repository),
        ]


async def _check_accounts(repository: AuditRepository) -> list[Violation]:
    return [
        *[
            Violation(id_, f"reserves {held}, due is {due}")
            for id_, held, due in await repository.reservations()
        ],
        *[
            Violation(id_, f"has spent {spent} in {month}, its usage is {used}")
            for id_, month, spent, used in await repository.spending()
        ],
        *[
            Violation(tenant_id, f"its hour {_hour(at)} of '{model}' is not the sum of its rows")
            for tenant_id, at, model in await repository.hours()
        ],
        *[
            Violation(record.id, f"bills {record.amount_nano}, due is {due}")
            for record, price in await repository.storage()
            if record.amount_nano != (due := storage_nano(price, record.bytes))
        ],
    ]


async def _check_invoices(repository: AuditRepository) -> list[Violation]:
    found = []
    for invoice, nano, rounded in await repository.invoices():
        if (invoice.amount_nano, invoice.amount_cents) != (nano, rounded):
            found.append(Violation(invoice.id, f"is not the sum of its lines, {nano}"))
    for line in await repository.lines():
        if line.amount_cents != cents(line.amount_nano):
            message = f"line {line.number} rounds {line.amount_nano} to {line.amount_cents} cents"
            found.append(Violation(line.invoice_id, message))
    for month in await repository.months():
        found += [
            Violation(month.invoice_id, f"{month.used} were used, {month.invoiced} invoiced")
            for month in await repository.invoiced(month)
            if month.invoiced > month.used or (month.invoiced < month.used and not month.is_newest)
        ]
    return found


async def _check_records(repository: AuditRepository) -> list[Violation]:
    found = []
    async for record, price, body in repository.metered():
        tokens = Tokens(record.prompt_tokens, record.cached_tokens, record.completion_tokens)
        amount = amount_nano(
            price,
            record.request_class,  # type: ignore[arg-type]
            tokens.prompt,
            tokens.cached,
            tokens.completion,
        )
        if amount != record.amount_nano:
            found.append(Violation(record.id, f"bills {record.amount_nano}, due is {amount}"))
        if body is not None and usage_of(body) != tokens:
            found.append(Violation(record.id, f"meters {tokens}, delivered {usage_of(body)}"))
    return found


async def _check_batches(repository: AuditRepository) -> list[Violation]:
    found = []
    for batch in await repository.batches():
        if batch.counted != batch.metered:
            message = f"counted {batch.counted}, metered {batch.metered}"
            found.append(Violation(batch.batch_id, message))
        if batch.completed != batch.metered_requests:
            message = f"{batch.completed} completed, {batch.metered_requests} metered"
            found.append(Violation(batch.batch_id, message))
    return found


async def _check_outputs(repository: AuditRepository, store: ObjectStore) -> list[Violation]:
    found = []
    for batch, file in await repository.outputs():
        counted = Tokens(batch.prompt_tokens, batch.cached_tokens, batch.completion_tokens)
        try:
            delivered, lines = await _delivered(store, file)
        except FileNotFoundError:
            found.append(Violation(batch.id, "its output is not in the store"))
            continue
        if delivered != counted or lines != batch.completed:
            message = f"{lines} lines with {delivered}, counted {batch.completed} with {counted}"
            found.append(Violation(batch.id, f"its output holds {message}"))
    return found


async def _delivered(store: ObjectStore, file: File | None) -> tuple[Tokens, int]:
    """Sum and number of an output's lines. Raises FileNotFoundError."""
    total, lines = Tokens(), 0
    if file is not None:
        async for line in _lines(store, file):
            total += usage_of(msgspec.json.decode(line)["response"]["body"])
            lines += 1
    return total, lines


def _hour(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%dT%H")


def usage_of(body: dict[str, Any]) -> Tokens:
    """Of an OpenAI body; nothing where it names nothing."""
    usage = body.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    return Tokens(
        usage.get("prompt_tokens", 0),
        details.get("cached_tokens", 0),
        usage.get("completion_tokens", 0),
    )


async def _lines(store: ObjectStore, file: File) -> AsyncIterator[bytes]:
    rest = b""
    async for chunk in read_blob(store, file.store_key):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest
