"""The life of a batch, as data.

    validating → failed
    validating → in_progress → finalizing → completed | expired
    validating | in_progress → cancelling → cancelled

A batch whose window ends is frozen (open lines become expired) on its way to `finalizing`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

BatchStatus = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]

TRANSITIONS: Mapping[BatchStatus, frozenset[BatchStatus]] = {
    "validating": frozenset({"failed", "in_progress", "cancelling"}),
    "in_progress": frozenset({"finalizing", "cancelling"}),
    "finalizing": frozenset({"completed", "expired"}),
    "cancelling": frozenset({"cancelled"}),
    "failed": frozenset(),
    "completed": frozenset(),
    "expired": frozenset(),
    "cancelled": frozenset(),
}
TERMINAL: frozenset[str] = frozenset(state for state, after in TRANSITIONS.items() if not after)

CancelDecision = Literal["begin", "unchanged", "refuse"]


class IllegalTransition(Exception):
    """A bug: the code asked for a change that the table does not allow."""


def check_transition(before: str, after: BatchStatus) -> None:
    """Raises IllegalTransition."""
    if after not in TRANSITIONS[before]:  # type: ignore[index]
        raise IllegalTransition(f"{before} → {after}")


def on_cancel(status: str) -> CancelDecision:
    """What a cancel call does: a batch that is finalizing completes, a cancelled one stays."""
    match status:
        case "validating" | "in_progress":
            return "begin"
        case "finalizing" | "cancelling" | "cancelled":
            return "unchanged"
        case _:
            return "refuse"


def final_status(status: str, expired_lines: int) -> BatchStatus:
    """Where a batch whose files are written ends."""
    if status == "cancelling":
        return "cancelled"
    return "expired" if expired_lines else "completed"
