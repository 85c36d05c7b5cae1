"""What tenants are told of, and what is sent: OpenAI's thin bodies.

{"id": "evt_…", "object": "event", "created_at": 1750000000, "type": "batch.completed",
 "data": {"id": "batch_…"}}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec

EventType = Literal[
    "batch.completed",
    "batch.failed",
    "batch.expired",
    "batch.cancelled",
    "job.completed",
    "job.failed",
    "job.cancelled",
    "adapter.ready",
    "adapter.rejected",
    "budget.threshold_reached",
    "invoice.finalized",
]
EVENT_TYPES: tuple[EventType, ...] = get_args(EventType)


@dataclass(frozen=True, slots=True)
class Target:
    """An endpoint that is told whatever its filter says; `url` overrides its own."""

    endpoint_id: str
    url: str | None = None


@dataclass(frozen=True, slots=True)
class NewEvent:
    """`data` names the object (`id`) and says little more: receivers fetch what they want."""

    tenant_id: str
    type: EventType
    data: Mapping[str, Any]
    target: Target | None = None


def event_body(event_id: str, event: NewEvent, now: int) -> str:
    body = {
        "id": event_id,
        "object": "event",
        "created_at": now // 1000,
        "type": event.type,
        "data": event.data,
    }
    return msgspec.json.encode(body).decode()
