from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from gateway.billing.service import dollars
from gateway.usage.repository import UsageSum


class UsageTotals(BaseModel):
    requests: int
    input_tokens: int
    cached_input_tokens: int
    output_tokens: int
    total_tokens: int
    amount_nano: int
    amount: str


class UsageGroup(UsageTotals):
    """`group`: a day's first Unix second (UTC), a model, class or key, or an adapter revision
    (null: the base model)."""

    group: str | int | None


class StorageUsage(BaseModel):
    """Adapters, metered by the hour."""

    gib_hours: str
    amount_nano: int
    amount: str


class UsageReport(BaseModel):
    """`data` and `total` are of requests; an invoice is both these and `storage`."""

    object: Literal["usage"] = "usage"
    start: int
    end: int
    group_by: str | None
    data: list[UsageGroup]
    total: UsageTotals
    storage: StorageUsage


def show_storage(byte_hours: int, amount_nano: int) -> StorageUsage:
    return StorageUsage(
        gib_hours=f"{byte_hours / 2**30:.6f}", amount_nano=amount_nano, amount=dollars(amount_nano)
    )


def show_totals(total: UsageSum) -> UsageTotals:
    return UsageTotals(
        requests=total.requests,
        input_tokens=total.prompt,
        cached_input_tokens=total.cached,
        output_tokens=total.completion,
        total_tokens=total.prompt + total.completion,
        amount_nano=total.amount_nano,
        amount=dollars(total.amount_nano),
    )


def show_group(total: UsageSum, by_day: bool) -> UsageGroup:
    group = total.group
    if by_day and isinstance(group, int):
        group //= 1000
    return UsageGroup(group=group, **show_totals(total).model_dump())
