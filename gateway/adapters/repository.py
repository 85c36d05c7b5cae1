from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Select, and_, delete, exists, func, not_, or_, select
from sqlalchemy.sql.elements import ColumnElement

from gateway.auth.scope import SharedScope, TenantScope
from gateway.kit.clock import now_ms
from gateway.kit.database import ReadSession, WriteSession
from gateway.kit.ids import new_id
from gateway.kit.pagination import Page, PageRequest, fetch_page
from gateway.kit.sql import among, insert_ignoring
from gateway.models import (
    Adapter,
    AdapterContent,
    AdapterGrant,
    AdapterRevision,
    BaseModel,
    Request,
    Tenant,
)
from gateway.models.request import is_out

Session = ReadSession | WriteSession


class BaseModelRepository:
    """What this deployment serves: the same for every tenant."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def get(self, name: str) -> BaseModel | None:
        return await self._session.get(BaseModel, name)

    async def all(self) -> Sequence[BaseModel]:
        return (await self._session.scalars(select(BaseModel).order_by(BaseModel.name))).all()

    def add(self, row: BaseModel) -> None:
        self._session.add(row)


class AdapterRepository:
    """One tenant's adapters and their revisions, or the shared ones."""

    def __init__(self, session: Session, scope: TenantScope | SharedScope) -> None:
        self._session = session
        self._scope = scope

    def _adapters(self) -> Select[Adapter]:
        return select(Adapter).where(Adapter.tenant_id == self._scope.tenant_id)

    def _revisions(self) -> Select[AdapterRevision]:
        return select(AdapterRevision).where(AdapterRevision.tenant_id == self._scope.tenant_id)

    async def named(self, name: str) -> Adapter | None:
        rows = self._adapters().where(Adapter.name == name, Adapter.deleted_at.is_(None))
        return await self._session.scalar(rows)

    async def lock_tenant(self) -> None:
        """Serialises decisions about which names the tenant has."""
        row = select(Tenant.id).where(Tenant.id == self._scope.tenant_id)
        await self._session.execute(row.with_for_update(key_share=True))

    async def holdings(self) -> tuple[int, int]:
        """Living adapters, and the bytes of their revisions that are not rejected."""
        living = (Adapter.tenant_id == self._scope.tenant_id, Adapter.deleted_at.is_(None))
        count = select(func.count()).select_from(Adapter).where(*living)
        size = (
            select(func.sum(AdapterRevision.bytes))
            .join(Adapter, Adapter.id == AdapterRevision.adapter_id)
            .where(*living, AdapterRevision.status != "rejected")
        )
        adapters, held = await self._session.scalar(count), await self._session.scalar(size)
        return adapters or 0, int(held or 0)

    async def granted(self, name: str) -> Adapter | None:
        """The shared adapter of that name, if the tenant may use it."""
        rows = self._shared().where(Adapter.name == name, Adapter.deleted_at.is_(None))
        return await self._session.scalar(rows)

    def _shared(self) -> Select[Adapter]:
        return (
            select(Adapter)
            .join(AdapterGrant, AdapterGrant.adapter_id == Adapter.id)
            .where(AdapterGrant.tenant_id == self._scope.tenant_id)
        )

    async def named_or_new(self, name: str, base_model: str) -> Adapter:
        """Locked. Two uploads of a new name at once make one adapter."""
        new = insert_ignoring(self._session, Adapter).values(
            id=new_id("adapter"),
            tenant_id=self._scope.tenant_id,
            name=name,
            base_model=base_model,
            created_at=now_ms(),
        )
        await self._session.execute(new)
        rows = self._adapters().where(Adapter.name == name, Adapter.deleted_at.is_(None))
        return (await self._session.scalars(rows.with_for_update())).one()

    async def get(self, id_or_name: str, lock: bool = False) -> Adapter | None:
        rows = self._adapters().where(
            (Adapter.id == id_or_name) | (Adapter.name == id_or_name), Adapter.deleted_at.is_(None)
        )
        return await self._session.scalar(rows.with_for_update() if lock else rows)

    async def page(self, page: PageRequest) -> Page[Adapter]:
        rows = self._adapters()
        living = rows.where(Adapter.deleted_at.is_(None))
        return await fetch_page(self._session, Adapter, living, page, cursors=rows)

    async def promoted(self) -> Sequence[tuple[Adapter, AdapterRevision]]:
        """Adapters that answer to their bare name, granted ones last, with what they answer
        with."""
        found: list[tuple[Adapter, AdapterRevision]] = []
        for adapters in (self._adapters(), self._shared()):
            rows = (
                adapters.join(AdapterRevision, AdapterRevision.id == Adapter.promoted_revision_id)
                .where(Adapter.deleted_at.is_(None))
                .order_by(Adapter.name)
                .add_columns(AdapterRevision)
            )
            found += [(row[0], row[1]) for row in await self._session.execute(rows)]
        return found

    async def revision(self, adapter_id: str, id_or_number: str) -> AdapterRevision | None:
        rows = self._revisions().where(AdapterRevision.adapter_id == adapter_id)
        if id_or_number.isdecimal() and len(id_or_number) < 10:
            rows = rows.where(AdapterRevision.number == int(id_or_number))
        else:
            rows = rows.where(AdapterRevision.id == id_or_number)
        return await self._session.scalar(rows)

    async def revisions(self, adapter_id: str, page: PageRequest) -> Page[AdapterRevision]:
        rows = self._revisions().where(AdapterRevision.adapter_id == adapter_id)
        return await fetch_page(self._session, AdapterRevision, rows, page)

    async def ready_before(self, adapter_id: str, number: int) -> AdapterRevision | None:
        rows = self._revisions().where(
            AdapterRevision.adapter_id == adapter_id,
            AdapterRevision.status == "ready",
            AdapterRevision.number < number,
        )
        return await self._session.scalar(rows.order_by(AdapterRevision.number.desc()).limit(1))

    async def next_number(self, adapter_id: str) -> int:
        rows = select(func.max(AdapterRevision.number)).where(
            AdapterRevision.adapter_id == adapter_id
        )
        return (await self._session.scalar(rows) or 0) + 1

    def add(self, row: Adapter | AdapterRevision) -> None:
        self._session.add(row)


class GrantRepository:
    """Which tenants may use which shared adapters: for operators."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def _of(self, adapter_id: str) -> Select[AdapterGrant]:
        return select(AdapterGrant).where(AdapterGrant.adapter_id == adapter_id)

    async def page(self, adapter_id: str, page: PageRequest) -> Page[AdapterGrant]:
        return await fetch_page(self._session, AdapterGrant, self._of(adapter_id), page)

    async def get(self, adapter_id: str, tenant_id: str) -> AdapterGrant | None:
        rows = self._of(adapter_id).where(AdapterGrant.tenant_id == tenant_id)
        return await self._session.scalar(rows)

    async def add(self, adapter_id: str, tenant_id: str) -> None:
        """Granting twice is granting."""
        new = insert_ignoring(self._session, AdapterGrant).values(
            id=new_id("grant"), adapter_id=adapter_id, tenant_id=tenant_id, created_at=now_ms()
        )
        await self._session.execute(new)

    async def remove(self, grant: AdapterGrant) -> None:
        await self._session.execute(delete(AdapterGrant).where(AdapterGrant.id == grant.id))


class IngestRepository:
    """Uploads of all tenants that wait to be checked: for the control processes."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def waiting(self, limit: int) -> Sequence[str]:
        rows = select(AdapterRevision.id).where(AdapterRevision.status == "validating")
        rows = rows.order_by(AdapterRevision.created_at).limit(limit)
        return (await self._session.scalars(rows)).all()

    async def waiting_among(self, revision_ids: Collection[str]) -> set[str]:
        rows = select(AdapterRevision.id).where(
            AdapterRevision.id.in_(revision_ids), AdapterRevision.status == "validating"
        )
        return set(await self._session.scalars(rows))

    async def get(self, revision_id: str, lock: bool = False) -> AdapterRevision | None:
        rows = select(AdapterRevision).where(AdapterRevision.id == revision_id)
        return await self._session.scalar(rows.with_for_update() if lock else rows)

    async def adapter(self, adapter_id: str, lock: bool = False) -> Adapter | None:
        rows = select(Adapter).where(Adapter.id == adapter_id)
        return await self._session.scalar(rows.with_for_update() if lock else rows)


class ContentRepository:
    """Adapters' files in the store, by their digest: for the control processes.

    Before files are written their revision has the digest; before they are removed the content is
    marked, under a lock that both take. So either the upload is seen, and nothing is removed, or
    the mark, and the upload waits until all of the old files are gone.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    async def claim(self, revision: AdapterRevision, digest: str) -> bool:
        """Whether `revision`, which is locked, may write files of `digest`."""
        new = insert_ignoring(self._session, AdapterContent)
        await self._session.execute(new.values(digest=digest, created_at=now_ms()))
        content = await self._locked(digest)
        if content is None or content.purging_at is not None:
            return False
        revision.digest = digest
        return True

    async def unused(self, deleted_before: int, after: str, limit: int) -> Sequence[str]:
        """Digests, those that follow `after`, of what no adapter has that lives or was deleted
        later, and no request in the queue or on a worker; also of what is being purged."""
        unused = select(AdapterContent.digest).where(
            AdapterContent.digest > after, _is_unused(deleted_before)
        )
        rows = await self._session.scalars(unused.order_by(AdapterContent.digest).limit(limit))
        return rows.all()

    async def begin_purge(
        self, digest: str, *, deleted_before: int, now: int, given_up: int
    ) -> bool:
        """Marks a content that is still unused. False as well while another sweep has it that
        began after `given_up`."""
        content = await self._locked(digest)
        if content is None or (content.purging_at or 0) > given_up:
            return False
        unused = select(AdapterContent.digest).where(
            AdapterContent.digest == digest, _is_unused(deleted_before)
        )
        if await self._session.scalar(unused) is None:
            return False
        content.purging_at = now
        return True

    async def end_purge(self, digest: str, begun: int, gone: bool) -> None:
        """Uploads may write files of that content again. Not `gone`: a later sweep tries again."""
        content = await self._locked(digest)
        if content is None or content.purging_at != begun:
            return
        if gone:
            await self._session.delete(content)
        else:
            content.purging_at = None

    async def _locked(self, digest: str) -> AdapterContent | None:
        rows = select(AdapterContent).where(AdapterContent.digest == digest)
        return await self._session.scalar(rows.with_for_update())


def _is_unused(deleted_before: int) -> ColumnElement[bool]:
    of_content = AdapterRevision.digest == AdapterContent.digest
    lives = or_(Adapter.deleted_at.is_(None), Adapter.deleted_at > deleted_before)
    kept = exists().where(
        of_content,
        Adapter.id == AdapterRevision.adapter_id,
        or_(AdapterRevision.status == "validating", and_(AdapterRevision.status == "ready", lives)),
    )
    runs = exists().where(is_out(), Request.adapter_revision_id == AdapterRevision.id, of_content)
    return not_(or_(kept, runs))


async def prompt_formats(
    session: Session, revision_ids: Collection[str | None]
) -> dict[str | None, dict[str, Any]]:
    """Of those revisions that have their own."""
    ids = sorted(each for each in revision_ids if each is not None)
    if not ids:
        return {}
    rows = await session.execute(
        select(AdapterRevision.id, AdapterRevision.prompt_format).where(
            among(session, AdapterRevision.id, ids), AdapterRevision.prompt_format.is_not(None)
        )
    )
    return {row[0]: row[1] for row in rows if row[1]}
