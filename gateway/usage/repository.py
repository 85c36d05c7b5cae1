from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import BigInteger, ColumnElement, Select, case, cast, func, null, select, union_all

from gateway.auth.scope import TenantScope
from gateway.billing.booking import HOUR_MS
from gateway.kit.clock import now_ms
from gateway.kit.database import ReadSession
from gateway.models import StorageRecord, UsageHour, UsageRecord

GroupBy = Literal["day", "adapter", "model", "class", "key"]
_DAY_MS = 86_400_000

Table = type[UsageHour] | type[UsageRecord]


@dataclass(frozen=True, slots=True)
class UsageSum:
    """`group` is the value grouped by; for days, the first millisecond of a UTC day."""

    group: str | int | None
    requests: int
    prompt: int
    cached: int
    completion: int
    amount_nano: int


class UsageRepository:
    """One tenant's usage, summed. Corrections count in sums, but are no requests."""

    def __init__(self, session: ReadSession, scope: TenantScope) -> None:
        self._session = session
        self._scope = scope

    async def sums(self, start: int, end: int, group_by: GroupBy | None) -> Sequence[UsageSum]:
        """Records of [start, end) milliseconds, by group in ascending order."""
        parts = union_all(
            *(
                self._counted(table, group_by).where(table.created_at >= at, table.created_at < to)
                for table, at, to in _parts(start, end, now_ms())
            )
        ).subquery()
        group, *columns = parts.c
        totals = (cast(func.coalesce(func.sum(column), 0), BigInteger) for column in columns)
        summed = select(group, *totals).group_by(group).order_by(group)
        return [UsageSum(*each) for each in await self._session.execute(summed)]

    async def storage(self, start: int, end: int) -> tuple[int, int]:
        """Byte-hours of adapters and nanodollars of the hours that began in [start, end)."""
        columns = (StorageRecord.bytes, StorageRecord.amount_nano)
        totals = (cast(func.coalesce(func.sum(column), 0), BigInteger) for column in columns)
        rows = select(*totals).where(
            StorageRecord.tenant_id == self._scope.tenant_id,
            StorageRecord.created_at >= start,
            StorageRecord.created_at < end,
        )
        row = (await self._session.execute(rows)).one()
        return int(row[0]), int(row[1])

    def _counted(self, table: Table, group_by: GroupBy | None) -> Select[Any]:
        """Group, requests, tokens and amount of each row."""
        is_request = case((UsageRecord.request_id.is_(None), 0), else_=1)
        columns = (
            _group(table, group_by).label("grouped"),
            UsageHour.requests if table is UsageHour else is_request,
            table.prompt_tokens,
            table.cached_tokens,
            table.completion_tokens,
            table.amount_nano,
        )
        return select(*columns).where(table.tenant_id == self._scope.tenant_id)


def total_of(sums: Sequence[UsageSum]) -> UsageSum:
    def total(name: str) -> int:
        return sum(getattr(each, name) for each in sums)

    names = ("requests", "prompt", "cached", "completion", "amount_nano")
    return UsageSum(None, *map(total, names))


def _parts(start: int, end: int, now: int) -> list[tuple[Table, int, int]]:
    """Whole hours, from their sums, and what is left at both ends, from the rows. Before an `end`
    that is yet to come the running hour is whole."""
    first = -(-start // HOUR_MS) * HOUR_MS
    last = (end if end <= now else end + HOUR_MS - 1) // HOUR_MS * HOUR_MS
    if first >= last:
        return [(UsageRecord, start, end)]
    parts: list[tuple[Table, int, int]] = [(UsageHour, first, last)]
    parts += [(UsageRecord, at, to) for at, to in ((start, first), (last, end)) if at < to]
    return parts


def _group(table: Table, group_by: GroupBy | None) -> ColumnElement[Any]:
    match group_by:
        case None:
            return null()
        case "day":
            return cast(table.created_at - table.created_at % _DAY_MS, BigInteger)
        case "adapter":
            return func.nullif(table.adapter_revision_id, "")
        case "model":
            return table.model.expression
        case "class":
            return table.request_class.expression
        case "key":
            return table.key_id.expression
