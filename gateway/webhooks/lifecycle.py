"""Endpoints of a tenant: made, changed, deleted; and their secrets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.auth.scope import TenantScope
from gateway.errors import BadRequest, Conflict, NotFound
from gateway.kit.clock import now_ms
from gateway.kit.context import Context
from gateway.kit.database import ReadSession, WriteSession
from gateway.kit.ids import new_id
from gateway.models import WebhookEndpoint, WebhookSecret
from gateway.webhooks.repository import EndpointRepository
from gateway.webhooks.schemas import EVERY, CreateEndpoint, UpdateEndpoint
from gateway.webhooks.secrets import WrongSecretKey, new_secret, reveal
from gateway.webhooks.urls import check_url, origin

DEFAULT = "default"
"""In place of an endpoint's id: the tenant's default secret, which signs for jobs' URLs."""


@dataclass(frozen=True, slots=True)
class Shown:
    """An endpoint and its current secret's row."""

    endpoint: WebhookEndpoint
    secret: WebhookSecret = field(repr=False)


async def create_endpoint(
    session: WriteSession, context: Context, scope: TenantScope, wanted: CreateEndpoint
) -> Shown:
    """Raises BadRequest (url), Conflict when the tenant has its most."""
    url = check_url(wanted.url, "url", context.settings.webhook_allow_private)
    repository = EndpointRepository(session, scope)
    most = context.settings.webhook_endpoints
    await repository.lock_tenant()
    if await repository.count() >= most:
        raise Conflict(
            f"You have {most} webhook endpoints, which is the most.",
            code="webhook_endpoint_limit_exceeded",
        )
    now = now_ms()
    endpoint = WebhookEndpoint(
        id=new_id("we"),
        tenant_id=scope.tenant_id,
        kind="endpoint",
        name=wanted.name,
        url=url,
        event_types=_stored(wanted.event_types),
        failures=0,
        created_at=now,
        updated_at=now,
    )
    repository.add(endpoint)
    await session.flush()
    secret = new_secret(context.secret_key, scope.tenant_id, endpoint.id, now)
    repository.add(secret)
    await session.flush()
    return Shown(endpoint, secret)


async def get_endpoint(
    session: ReadSession | WriteSession, scope: TenantScope, endpoint_id: str, lock: bool = False
) -> WebhookEndpoint:
    """Raises NotFound."""
    endpoint = await EndpointRepository(session, scope).get(endpoint_id, lock)
    if endpoint is None:
        raise NotFound(f"No webhook endpoint found with id '{endpoint_id}'.", param="id")
    return endpoint


async def update_endpoint(
    session: WriteSession,
    context: Context,
    scope: TenantScope,
    endpoint_id: str,
    wanted: UpdateEndpoint,
) -> WebhookEndpoint:
    """What is left out stays. Deliveries on their way go to the new URL at their next attempt.
    Raises NotFound, BadRequest."""
    endpoint = await get_endpoint(session, scope, endpoint_id, lock=True)
    given = wanted.model_fields_set
    if "name" in given:
        endpoint.name = wanted.name
    if "event_types" in given:
        endpoint.event_types = _stored(wanted.event_types)
    if "url" in given:
        endpoint.url = check_url(wanted.url, "url", context.settings.webhook_allow_private)
    if "enabled" in given:
        endpoint.disabled_at = None if wanted.enabled else endpoint.disabled_at or now_ms()
        endpoint.disabled_reason = None if wanted.enabled else endpoint.disabled_reason or "asked"
    if given & {"url", "enabled"}:
        endpoint.failures, endpoint.failing_since, endpoint.paused_until = 0, None, None
    if given:
        endpoint.updated_at = now_ms()
    return endpoint


async def delete_endpoint(
    session: WriteSession, scope: TenantScope, endpoint_id: str
) -> WebhookEndpoint:
    """Nothing is sent there any more. Raises NotFound."""
    await EndpointRepository(session, scope).fail_pending(endpoint_id)
    endpoint = await get_endpoint(session, scope, endpoint_id, lock=True)
    endpoint.deleted_at = now_ms()
    return endpoint


async def rotate_secret(
    session: WriteSession,
    context: Context,
    scope: TenantScope,
    endpoint_id: str | None,
    overlap_seconds: int,
) -> WebhookSecret:
    """A new current secret; the one before signs for `overlap_seconds` more, an older one no
    longer. None: the tenant's default secret, made when there is none."""
    repository = EndpointRepository(session, scope)
    await repository.lock_tenant()
    now = now_ms()
    for old in await repository.secrets(endpoint_id):
        old.expires_at = now + overlap_seconds * 1000 if old.expires_at is None else now
    await session.flush()
    secret = new_secret(context.secret_key, scope.tenant_id, endpoint_id, now)
    repository.add(secret)
    await session.flush()
    return secret


async def webhook_target(
    session: ReadSession, context: Context, scope: TenantScope, webhook: str | None
) -> tuple[str | None, str | None]:
    """What a job's `webhook` is: (id of an endpoint, None), or (None, URL). Raises BadRequest."""
    if webhook is None:
        return None, None
    if "://" in webhook:
        return None, check_url(webhook, "webhook", context.settings.webhook_allow_private)
    if await EndpointRepository(session, scope).get(webhook) is None:
        raise BadRequest(
            f"Invalid value for 'webhook': '{webhook}' is neither a URL nor one of your webhook "
            "endpoints.",
            code="invalid_value",
            param="webhook",
        )
    return webhook, None


async def endpoint_for_url(
    session: WriteSession, context: Context, scope: TenantScope, url: str
) -> str:
    """The id of the hidden endpoint that stands for a job's URL (checked before). The tenant gets
    a default secret if it has none."""
    repository = EndpointRepository(session, scope)
    if not await repository.secrets(None):
        await repository.lock_tenant()
        if not await repository.secrets(None):
            repository.add(new_secret(context.secret_key, scope.tenant_id, None, now_ms()))
            await session.flush()
    return await repository.for_origin(origin(url))


async def secret_text(
    session: ReadSession | WriteSession, context: Context, scope: TenantScope, secret_id: str
) -> str | None:
    """None when it is gone. Raises Conflict when it was derived from another deployment key."""
    secret = await EndpointRepository(session, scope).secret(secret_id)
    if secret is None:
        return None
    try:
        return reveal(context.secret_key, secret).text
    except WrongSecretKey as error:
        raise Conflict(
            "This signing secret cannot be shown again: BATTEN_SECRET_KEY (or secret.key in the "
            "data directory) has changed since. Please rotate the secret.",
            code="secret_not_available",
        ) from error


def _stored(event_types: Sequence[str]) -> list[str] | None:
    return None if EVERY in event_types else sorted(set(event_types))
