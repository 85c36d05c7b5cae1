"""Where usage is recorded: each row, and in the same transaction the sums of its hour.

The sums answer what would otherwise scan a month of rows: invoices, and `/v1/usage`. `batten audit`
compares them with the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from gateway.kit.database import WriteSession
from gateway.kit.sql import add_rows, insert_new
from gateway.models import UsageHour, UsageRecord

HOUR_MS = 3_600_000
_TOKENS = ("prompt_tokens", "cached_tokens", "completion_tokens")
SUMS = ("requests", *_TOKENS, "amount_nano")
_KEY = tuple(column.name for column in UsageHour.__table__.primary_key)

Row = Mapping[str, Any]


async def book(session: WriteSession, rows: Sequence[Row]) -> list[Row]:
    """`rows` of UsageRecord, all of the same columns. Returns those that are new: a request is
    metered once. Locks the sums that they belong to: call it late, and before accounts are
    locked."""
    inserted = set(await insert_new(session, UsageRecord, rows))
    new = [row for row in rows if row["id"] in inserted]
    await add_rows(session, UsageHour, hours_of(new), SUMS)
    return new


def hours_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """In the order of their keys, in which everyone locks them."""
    hours: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        hour = _hour(row)
        known = hours.setdefault(itemgetter(*_KEY)(hour), hour)
        if known is not hour:
            for name in SUMS:
                known[name] += hour[name]
    return [hours[key] for key in sorted(hours)]


def _hour(row: Row) -> dict[str, Any]:
    billed = row.get("request_id") is not None
    return {
        "tenant_id": row["tenant_id"],
        "created_at": row["created_at"] - row["created_at"] % HOUR_MS,
        "kind": "usage" if billed else "correction",
        "key_id": row["key_id"],
        "model": row["model"],
        "adapter_revision_id": row["adapter_revision_id"] or "",
        "request_class": row["request_class"],
        "price_id": row["price_id"],
        "requests": int(billed),
        **{name: row.get(name, 0) for name in _TOKENS},
        "amount_nano": row["amount_nano"],
    }
