"""Webhooks on the wire: OpenAI's objects, and what we know beyond them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway.kit.clock import seconds
from gateway.models import (
    WebhookAttempt,
    WebhookDelivery,
    WebhookEndpoint,
    WebhookEvent,
    WebhookSecret,
)
from gateway.webhooks.events import EVENT_TYPES, EventType

EVERY: Literal["*"] = "*"
DAY = 86_400

Name = Annotated[str, Field(max_length=128, pattern=r"^[^\x00-\x1f]*$")]
EventTypes = Annotated[
    list[EventType | Literal["*"]],
    Field(min_length=1, max_length=100, description="`*`: all, also those of later releases"),
]


class CreateEndpoint(BaseModel):
    model_config = ConfigDict(extra="forbid")

    url: str
    event_types: EventTypes = Field(default=[EVERY])
    name: Name = ""


class UpdateEndpoint(BaseModel):
    """What is left out stays. `enabled: true` also forgives an endpoint its failures."""

    model_config = ConfigDict(extra="forbid")

    url: str = ""
    event_types: EventTypes = Field(default=[EVERY])
    name: Name = ""
    enabled: bool = True


class RotateSecret(BaseModel):
    """How long the old secret still signs, besides the new one. OpenAI's parameter means a day,
    or not at all."""

    model_config = ConfigDict(extra="forbid")

    overlap_seconds: int = Field(DAY, ge=0, le=30 * DAY)
    keep_old_secret_active_for_24_hours: bool | None = None

    @property
    def overlap(self) -> int:
        if self.keep_old_secret_active_for_24_hours is None:
            return self.overlap_seconds
        return DAY if self.keep_old_secret_active_for_24_hours else 0


class SendTest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    event_type: EventType = Field("batch.completed", description="Of the sample that is sent")


class Redeliver(BaseModel):
    model_config = ConfigDict(extra="forbid")

    webhook_endpoint_id: str | None = Field(
        None, description="Send it there, told before or not; default: to all that were told"
    )


class EndpointObject(BaseModel):
    """`failures` in a row, the first one at `failing_since`, pause deliveries until `paused_until`.
    `disabled_reason`: "gone" after a 410, "asked" when the tenant did it."""

    id: str
    object: Literal["webhook_endpoint"] = "webhook_endpoint"
    name: str
    url: str
    event_types: list[str]
    signing_secret_hint: str | None
    status: Literal["enabled", "disabled"]
    disabled_reason: str | None
    failures: int
    failing_since: int | None
    paused_until: int | None
    created_at: int
    updated_at: int


class NewEndpointObject(EndpointObject):
    signing_secret: str | None = Field(
        default=None, repr=False, description="Shown once: it is not kept"
    )


class SecretObject(BaseModel):
    """The tenant's default secret."""

    id: Literal["default"] = "default"
    object: Literal["webhook_secret"] = "webhook_secret"
    signing_secret: str | None = Field(
        default=None, repr=False, description="Shown once: it is not kept"
    )
    signing_secret_hint: str
    created_at: int


class EndpointDeleted(BaseModel):
    id: str
    object: Literal["webhook_endpoint.deleted"] = "webhook_endpoint.deleted"
    deleted: Literal[True] = True


class SentTest(BaseModel):
    object: Literal["webhook_endpoint.test"] = "webhook_endpoint.test"
    webhook_endpoint_id: str
    event_type: str
    status_code: int
    success: Literal[True] = True


class EventTypeList(BaseModel):
    object: Literal["list"] = "list"
    data: list[str] = Field(default=list(EVENT_TYPES))


class EventObject(BaseModel):
    """What receivers are sent."""

    id: str
    object: Literal["event"] = "event"
    created_at: int
    type: str
    data: dict[str, Any]


class AttemptObject(BaseModel):
    """`status_code` of the receiver, or an `error`: timeout, name_not_resolved,
    address_not_allowed, https_required, connection_failed, connection_lost, tls_failed,
    not_signed."""

    number: int
    at: int
    duration_ms: int
    status_code: int | None
    error: str | None


class DeliveryObject(BaseModel):
    """`webhook_endpoint_id` is null for a URL that a job named."""

    id: str
    object: Literal["webhook_delivery"] = "webhook_delivery"
    event_id: str
    webhook_endpoint_id: str | None
    url: str
    status: Literal["pending", "delivered", "failed"]
    attempts: list[AttemptObject]
    next_attempt_at: int | None
    created_at: int
    finished_at: int | None


def show_endpoint(row: WebhookEndpoint, hint: str | None) -> EndpointObject:
    return EndpointObject(
        id=row.id,
        name=row.name,
        url=row.url,
        event_types=[EVERY] if row.event_types is None else row.event_types,
        signing_secret_hint=hint,
        status="enabled" if row.disabled_at is None else "disabled",
        disabled_reason=row.disabled_reason,
        failures=row.failures,
        failing_since=seconds(row.failing_since),
        paused_until=seconds(row.paused_until),
        created_at=row.created_at // 1000,
        updated_at=row.updated_at // 1000,
    )


def show_default_secret(row: WebhookSecret) -> SecretObject:
    return SecretObject(signing_secret_hint=row.hint, created_at=row.created_at // 1000)


def show_event(row: WebhookEvent) -> EventObject:
    return EventObject.model_validate(json.loads(row.body))


def show_delivery(
    row: WebhookDelivery, url: str, attempts: Sequence[WebhookAttempt]
) -> DeliveryObject:
    return DeliveryObject.model_validate(
        {
            "id": row.id,
            "event_id": row.event_id,
            "webhook_endpoint_id": row.endpoint_id if row.url is None else None,
            "url": row.url or url,
            "status": row.state,
            "attempts": [show_attempt(attempt) for attempt in attempts],
            "next_attempt_at": seconds(row.next_attempt_at) if row.state == "pending" else None,
            "created_at": row.created_at // 1000,
            "finished_at": seconds(row.finished_at),
        }
    )


def show_attempt(row: WebhookAttempt) -> AttemptObject:
    return AttemptObject(
        number=row.number,
        at=row.at // 1000,
        duration_ms=row.duration_ms,
        status_code=row.status_code,
        error=row.error,
    )
