from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import and_, or_, select

from gateway.kit.database import ReadSession, WriteSession
from gateway.models import WebhookEndpoint

Session = ReadSession | WriteSession


async def live_endpoints(
    session: Session, tenant_ids: Collection[str], named: Collection[str] = ()
) -> Sequence[WebhookEndpoint]:
    """Endpoints that these tenants registered, and those of the ids `named`."""
    registered = and_(WebhookEndpoint.tenant_id.in_(tenant_ids), WebhookEndpoint.kind == "endpoint")
    rows = select(WebhookEndpoint).where(
        or_(registered, WebhookEndpoint.id.in_(named)),
        WebhookEndpoint.deleted_at.is_(None),
        WebhookEndpoint.disabled_at.is_(None),
    )
    return (await session.scalars(rows.order_by(WebhookEndpoint.id))).all()
