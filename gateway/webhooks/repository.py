from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import Select, and_, func, literal_column, or_, select, update
from sqlalchemy.sql.elements import ColumnElement

from gateway.auth.scope import TenantScope
from gateway.kit.clock import now_ms
from gateway.kit.database import ReadSession, WriteSession
from gateway.kit.ids import new_id
from gateway.kit.pagination import Page, PageRequest, fetch_page
from gateway.kit.sql import insert_ignoring
from gateway.models import (
    Tenant,
    WebhookAttempt,
    WebhookDelivery,
    WebhookEndpoint,
    WebhookEvent,
    WebhookSecret,
)

Session = ReadSession | WriteSession

# As the conditions of indexes say it.
PENDING: ColumnElement[str] = literal_column("'pending'")
IS_REGISTERED: ColumnElement[bool] = literal_column("webhook_endpoints.kind = 'endpoint'")


async def live_endpoints(
    session: Session, tenant_ids: Collection[str], named: Collection[str] = ()
) -> Sequence[WebhookEndpoint]:
    """Endpoints that are enabled: those that these tenants registered, and of the ids `named`."""
    enabled = select(WebhookEndpoint).where(
        WebhookEndpoint.deleted_at.is_(None), WebhookEndpoint.disabled_at.is_(None)
    )
    registered = enabled.where(IS_REGISTERED, WebhookEndpoint.tenant_id.in_(tenant_ids))
    found = {row.id: row for row in await session.scalars(registered)}
    if named:
        of_ids = enabled.where(WebhookEndpoint.id.in_(named))
        found |= {row.id: row for row in await session.scalars(of_ids)}
    return [found[each] for each in sorted(found)]


class EndpointRepository:
    """One tenant's endpoints and secrets."""

    def __init__(self, session: Session, scope: TenantScope) -> None:
        self._session = session
        self._scope = scope

    def _all(self) -> Select[WebhookEndpoint]:
        """Those that the tenant registered, deleted ones too."""
        return select(WebhookEndpoint).where(
            WebhookEndpoint.tenant_id == self._scope.tenant_id, IS_REGISTERED
        )

    def _living(self) -> Select[WebhookEndpoint]:
        return self._all().where(WebhookEndpoint.deleted_at.is_(None))

    async def get(self, endpoint_id: str, lock: bool = False) -> WebhookEndpoint | None:
        row = self._living().where(WebhookEndpoint.id == endpoint_id)
        return await self._session.scalar(row.with_for_update(key_share=True) if lock else row)

    async def page(self, page: PageRequest) -> Page[WebhookEndpoint]:
        return await fetch_page(
            self._session, WebhookEndpoint, self._living(), page, cursors=self._all()
        )

    async def lock_tenant(self) -> None:
        """Serialises decisions about how many endpoints and default secrets there are."""
        tenant = select(Tenant.id).where(Tenant.id == self._scope.tenant_id)
        await self._session.execute(tenant.with_for_update(key_share=True))

    async def count(self) -> int:
        living = self._living().subquery()
        return await self._session.scalar(select(func.count()).select_from(living)) or 0

    async def fail_pending(self, endpoint_id: str) -> None:
        """Its deliveries, in the order in which everyone locks them."""
        pending = (
            select(WebhookDelivery.id)
            .where(
                WebhookDelivery.tenant_id == self._scope.tenant_id,
                WebhookDelivery.endpoint_id == endpoint_id,
                WebhookDelivery.state == PENDING,
            )
            .order_by(WebhookDelivery.id)
            .with_for_update(key_share=True)
        )
        ids = list(await self._session.scalars(pending))
        await self._session.execute(
            update(WebhookDelivery)
            .where(WebhookDelivery.id.in_(ids))
            .values(state="failed", finished_at=now_ms())
            .execution_options(synchronize_session=False)
        )

    async def for_origin(self, origin: str) -> str:
        """The id of what stands for the origin of a job's URL, made when there is none."""
        now = now_ms()
        new = insert_ignoring(self._session, WebhookEndpoint).values(
            id=new_id("we"),
            tenant_id=self._scope.tenant_id,
            kind="origin",
            name="",
            url=origin,
            failures=0,
            created_at=now,
            updated_at=now,
        )
        await self._session.execute(new)
        rows = select(WebhookEndpoint.id).where(
            WebhookEndpoint.tenant_id == self._scope.tenant_id,
            WebhookEndpoint.kind == "origin",
            WebhookEndpoint.url == origin,
        )
        return (await self._session.scalars(rows)).one()

    async def secrets(self, endpoint_id: str | None) -> Sequence[WebhookSecret]:
        """Live ones, the current one first. None: the tenant's default."""
        rows = select(WebhookSecret).where(*self._owned(endpoint_id), is_live(now_ms()))
        newest_first = rows.order_by(WebhookSecret.created_at.desc(), WebhookSecret.id.desc())
        return (await self._session.scalars(newest_first)).all()

    async def hints(self, endpoint_ids: Collection[str]) -> dict[str, str]:
        """Of current secrets, by endpoint."""
        rows = await self._session.execute(
            select(WebhookSecret.endpoint_id, WebhookSecret.hint).where(
                WebhookSecret.tenant_id == self._scope.tenant_id,
                WebhookSecret.endpoint_id.in_(endpoint_ids),
                WebhookSecret.expires_at.is_(None),
            )
        )
        return {str(row[0]): row[1] for row in rows}

    async def secret(self, secret_id: str) -> WebhookSecret | None:
        rows = select(WebhookSecret).where(WebhookSecret.tenant_id == self._scope.tenant_id)
        return await self._session.scalar(rows.where(WebhookSecret.id == secret_id))

    def _owned(self, endpoint_id: str | None) -> tuple[ColumnElement[bool], ...]:
        owner = WebhookSecret.endpoint_id
        return (
            WebhookSecret.tenant_id == self._scope.tenant_id,
            owner.is_(None) if endpoint_id is None else owner == endpoint_id,
        )

    def add(self, row: WebhookEndpoint | WebhookSecret) -> None:
        self._session.add(row)


class EventRepository:
    """One tenant's events and their deliveries."""

    def __init__(self, session: Session, scope: TenantScope) -> None:
        self._session = session
        self._scope = scope

    def _all(self) -> Select[WebhookEvent]:
        return select(WebhookEvent).where(WebhookEvent.tenant_id == self._scope.tenant_id)

    async def get(self, event_id: str) -> WebhookEvent | None:
        return await self._session.scalar(self._all().where(WebhookEvent.id == event_id))

    async def page(self, page: PageRequest, type: str | None) -> Page[WebhookEvent]:
        rows = self._all() if type is None else self._all().where(WebhookEvent.type == type)
        return await fetch_page(self._session, WebhookEvent, rows, page, cursors=self._all())

    async def deliveries(self, event_id: str, page: PageRequest) -> Page[WebhookDelivery]:
        return await fetch_page(self._session, WebhookDelivery, self._deliveries(event_id), page)

    async def attempts(self, delivery_ids: Collection[str]) -> dict[str, list[WebhookAttempt]]:
        rows = select(WebhookAttempt).where(WebhookAttempt.delivery_id.in_(delivery_ids))
        by_delivery: dict[str, list[WebhookAttempt]] = {each: [] for each in delivery_ids}
        for attempt in await self._session.scalars(rows.order_by(WebhookAttempt.number)):
            by_delivery[attempt.delivery_id].append(attempt)
        return by_delivery

    async def urls(self, endpoint_ids: Collection[str]) -> dict[str, str]:
        rows = await self._session.execute(
            select(WebhookEndpoint.id, WebhookEndpoint.url).where(
                WebhookEndpoint.tenant_id == self._scope.tenant_id,
                WebhookEndpoint.id.in_(endpoint_ids),
            )
        )
        return {row[0]: row[1] for row in rows}

    async def sendable(self, event_id: str) -> Sequence[WebhookDelivery]:
        """Locked: deliveries of the event whose endpoints are alive."""
        alive = (
            select(WebhookEndpoint.id)
            .where(
                WebhookEndpoint.id == WebhookDelivery.endpoint_id,
                WebhookEndpoint.deleted_at.is_(None),
                WebhookEndpoint.disabled_at.is_(None),
            )
            .exists()
        )
        rows = self._deliveries(event_id).where(alive).order_by(WebhookDelivery.id)
        return (await self._session.scalars(rows.with_for_update(key_share=True))).all()

    async def unpause(self, endpoint_ids: Collection[str]) -> None:
        """One delivery may try each at once, whatever the circuit breaker waits for."""
        paused = and_(
            WebhookEndpoint.tenant_id == self._scope.tenant_id,
            WebhookEndpoint.id.in_(endpoint_ids),
            WebhookEndpoint.paused_until.is_not(None),
        )
        await self._session.execute(update(WebhookEndpoint).where(paused).values(paused_until=None))

    def _deliveries(self, event_id: str) -> Select[WebhookDelivery]:
        return select(WebhookDelivery).where(
            WebhookDelivery.tenant_id == self._scope.tenant_id,
            WebhookDelivery.event_id == event_id,
        )


def is_live(now: int) -> ColumnElement[bool]:
    return or_(WebhookSecret.expires_at.is_(None), WebhookSecret.expires_at > now)
