"""Calendar months in UTC, written "2026-11": they sort as text."""

from __future__ import annotations

from datetime import UTC, datetime

MONTH = r"[0-9]{4}-(0[1-9]|1[0-2])"


def month_of(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m")


def start_of(month: str) -> int:
    """Its first millisecond."""
    return int(_first(month).timestamp() * 1000)


def end_of(month: str) -> int:
    """The first millisecond after it."""
    return start_of(months_later(month, 1))


def months_later(month: str, count: int) -> str:
    first = _first(month)
    year, index = divmod(first.year * 12 + first.month - 1 + count, 12)
    return f"{year:04d}-{index + 1:02d}"


def _first(month: str) -> datetime:
    return datetime.strptime(month, "%Y-%m").replace(tzinfo=UTC)
