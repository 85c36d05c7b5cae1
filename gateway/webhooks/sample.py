"""A sample event for an endpoint, sent at once: nothing is recorded of it."""

from __future__ import annotations

from gateway.auth.scope import TenantScope
from gateway.errors import BadRequest
from gateway.kit.clock import now_ms
from gateway.kit.context import Context
from gateway.kit.ids import new_id
from gateway.webhooks.events import EventType, NewEvent, event_body
from gateway.webhooks.lifecycle import get_endpoint
from gateway.webhooks.repository import EndpointRepository
from gateway.webhooks.secrets import reveal
from gateway.webhooks.sending import Sender
from gateway.webhooks.signing import signed_headers


async def send_sample(
    context: Context, scope: TenantScope, endpoint_id: str, type: EventType
) -> int:
    """The receiver's status. Raises NotFound, BadRequest when there is none."""
    async with context.database.read() as session:
        endpoint = await get_endpoint(session, scope, endpoint_id)
        rows = await EndpointRepository(session, scope).secrets(endpoint_id)
    event_id, now = new_id("evt"), now_ms()
    sample = NewEvent(scope.tenant_id, type, {"id": f"{type.partition('.')[0]}_sample"})
    body = event_body(event_id, sample, now).encode()
    secrets = [reveal(context.secret_key, row) for row in rows]
    sender = Sender(context.settings)
    try:
        outcome = await sender.send(
            endpoint.url, body, signed_headers(event_id, body, secrets, now // 1000)
        )
    finally:
        await sender.close()
    if outcome.status_code is None or outcome.error is not None:
        raise BadRequest(
            f"The endpoint did not answer: {outcome.error}.", code="webhook_endpoint_unreachable"
        )
    return outcome.status_code
