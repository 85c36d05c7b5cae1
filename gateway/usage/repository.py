from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import BigInteger, ColumnElement, cast, func, select

from gateway.auth.scope import TenantScope
from gateway.kit.database import ReadSession
from gateway.models import StorageRecord, UsageRecord

GroupBy = Literal["day", "adapter", "model", "class", "key"]
_DAY_MS = 86_400_000


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
        group = _group(group_by)
        columns = [UsageRecord.prompt_tokens, UsageRecord.cached_tokens]
        columns += [UsageRecord.completion_tokens, UsageRecord.amount_nano]
        totals = (cast(func.coalesce(func.sum(column), 0), BigInteger) for column in columns)
        rows = select(func.count(UsageRecord.request_id), *totals).where(
            UsageRecord.tenant_id == self._scope.tenant_id,
            UsageRecord.created_at >= start,
            UsageRecord.created_at < end,
        )
        if group is None:
            row = (await self._session.execute(rows)).one()
            return [UsageSum(None, *tuple(row))]
        rows = rows.add_columns(group.label("grouped")).group_by("grouped").order_by("grouped")
        return [UsageSum(row[-1], *tuple(row)[:-1]) for row in await self._session.execute(rows)]

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


def _group(group_by: GroupBy | None) -> ColumnElement[Any] | None:
    match group_by:
        case None:
            return None
        case "day":
            day = UsageRecord.created_at - UsageRecord.created_at % _DAY_MS
            return cast(day, BigInteger)
        case "adapter":
            return UsageRecord.adapter_revision_id.expression
        case "model":
            return UsageRecord.model.expression
        case "class":
            return UsageRecord.request_class.expression
        case "key":
            return UsageRecord.key_id.expression
