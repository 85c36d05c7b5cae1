"""States of a request. For queries there are `gateway.models.request.is_queued` and so on.

    held → queued ⇄ dispatched → running → completed | failed | cancelled | expired

`held` is a line of a batch that is still being validated. Terminal states are final. Clients see
`dispatched` as queued.
"""

from __future__ import annotations

from typing import Literal

TerminalState = Literal["completed", "failed", "cancelled", "expired"]

TERMINAL = frozenset({"completed", "failed", "cancelled", "expired"})
OUT = frozenset({"dispatched", "running"})


def public_state(state: str) -> str:
    return "queued" if state in {"dispatched", "held"} else state
