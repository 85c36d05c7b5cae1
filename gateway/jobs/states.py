"""States of a request, and the conditions that partial indices are made for.

    held → queued ⇄ dispatched → running → completed | failed | cancelled | expired

`held` is a line of a batch that is still being validated. Terminal states are final. Clients see
`dispatched` as queued. The conditions are literal SQL: a bound parameter would keep SQLite and
Postgres from using an index with a WHERE clause.
"""

from __future__ import annotations

from typing import Literal

from sqlalchemy import literal_column
from sqlalchemy.sql.elements import ColumnElement

TerminalState = Literal["completed", "failed", "cancelled", "expired"]

TERMINAL = frozenset({"completed", "failed", "cancelled", "expired"})
OUT = frozenset({"dispatched", "running"})
OPEN = OUT | {"queued"}


def is_queued() -> ColumnElement[bool]:
    return literal_column("requests.state = 'queued'")


def is_out() -> ColumnElement[bool]:
    return literal_column("requests.state IN ('dispatched', 'running')")


def is_open() -> ColumnElement[bool]:
    return literal_column("requests.state IN ('queued', 'dispatched', 'running')")


def public_state(state: str) -> str:
    return "queued" if state in {"dispatched", "held"} else state
