"""Shared adapters: the operator's own, usable by the tenants they are granted to.

A name means one adapter to a tenant: none is granted whose name the tenant has, and a tenant
uploads none under a name it was granted (`lifecycle.add_revision`).
"""

from __future__ import annotations

from gateway.adapters.lifecycle import get_adapter
from gateway.adapters.repository import AdapterRepository, GrantRepository
from gateway.auth.scope import SHARED, scope_for_background
from gateway.errors import Conflict, NotFound
from gateway.kit.database import WriteSession
from gateway.models import Adapter, AdapterGrant
from gateway.tenants.service import find_tenant


async def grant(session: WriteSession, id_or_name: str, tenant: str) -> AdapterGrant:
    """Idempotent. Raises NotFound, Conflict (`name_taken`)."""
    adapter = await get_adapter(session, SHARED, id_or_name, lock=True)
    owner = await find_tenant(session, tenant)
    theirs = AdapterRepository(session, scope_for_background(owner.id))
    await theirs.lock_tenant()
    if await theirs.named(adapter.name) is not None:
        raise Conflict(
            f"The tenant '{owner.name}' has an adapter named '{adapter.name}'.",
            code="name_taken",
            param="tenant",
        )
    grants = GrantRepository(session)
    await grants.add(adapter.id, owner.id)
    granted = await grants.get(adapter.id, owner.id)
    assert granted is not None
    return granted


async def revoke(
    session: WriteSession, id_or_name: str, tenant: str
) -> tuple[Adapter, AdapterGrant]:
    """New requests find no such model; those that wait fail, see `gateway.jobs.withdrawal`.
    Raises NotFound."""
    adapter = await get_adapter(session, SHARED, id_or_name, lock=True)
    owner = await find_tenant(session, tenant)
    grants = GrantRepository(session)
    granted = await grants.get(adapter.id, owner.id)
    if granted is None:
        raise NotFound(
            f"The adapter '{adapter.name}' is not granted to '{owner.name}'.",
            code="grant_not_found",
            param="tenant",
        )
    await grants.remove(granted)
    return adapter, granted
