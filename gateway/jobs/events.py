"""What a tenant is told when a job ends."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.jobs.locking import Standing
from gateway.jobs.states import TerminalState
from gateway.webhooks.events import EventType, NewEvent, Target

EVENTS: Mapping[TerminalState, EventType] = {
    "completed": "job.completed",
    "failed": "job.failed",
    "expired": "job.failed",
    "cancelled": "job.cancelled",
}
"""A job that missed its deadline has no answer either."""


def job_ended(row: Standing, state: TerminalState) -> NewEvent:
    target = None
    if row.webhook_endpoint_id is not None:
        target = Target(row.webhook_endpoint_id, row.webhook_url)
    return NewEvent(row.tenant_id, EVENTS[state], {"id": row.id}, target)
