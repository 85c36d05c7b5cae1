"""Tenants and their keys: what operators do, over HTTP or the command line."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from gateway.auth.keys import NewKey, derive_key, generate_key
from gateway.auth.limits import Limits
from gateway.auth.principal import RESOURCES, TENANT_SCOPES
from gateway.errors import BadRequest, Conflict, NotFound
from gateway.kit.clock import now_ms
from gateway.kit.database import ReadSession, WriteSession
from gateway.kit.ids import new_id
from gateway.models import Account, ApiKey, Tenant
from gateway.tenants.repository import TenantRepository

ADMIN_SCOPES = ("admin",)


@dataclass(frozen=True, slots=True)
class CreatedKey:
    """`secret` exists only here: the database keeps its hash."""

    key: ApiKey
    secret: str = field(repr=False)


async def create_tenant(session: WriteSession, name: str, weight: float = 1.0) -> Tenant:
    """Raises Conflict when the name is taken."""
    repository = TenantRepository(session)
    if await repository.named(name) is not None:
        raise Conflict(f"A tenant named '{name}' exists.", code="name_taken", param="name")
    tenant = Tenant(id=new_id("tenant"), name=name, weight=weight, limits={}, created_at=now_ms())
    repository.add(tenant)
    await session.flush()
    repository.add(Account(tenant_id=tenant.id, month="", warned_month=""))
    await session.flush()
    return tenant


async def find_tenant(session: ReadSession | WriteSession, id_or_name: str) -> Tenant:
    """Raises NotFound."""
    repository = TenantRepository(session)
    tenant = await repository.get(id_or_name) or await repository.named(id_or_name)
    if tenant is None:
        raise NotFound(f"No such tenant: '{id_or_name}'.", param="tenant")
    return tenant


async def update_tenant(
    session: WriteSession, id_or_name: str, weight: float | None, suspended: bool | None
) -> Tenant:
    """None leaves a field as it is. A suspended tenant's keys answer 403; its running work goes
    on. Raises NotFound."""
    tenant = await find_tenant(session, id_or_name)
    if weight is not None:
        tenant.weight = weight
    if suspended is not None and suspended != (tenant.suspended_at is not None):
        tenant.suspended_at = now_ms() if suspended else None
    return tenant


async def set_limits(session: WriteSession, id_or_name: str, limits: Limits) -> Tenant:
    """In force for the next request. Raises NotFound."""
    tenant = await find_tenant(session, id_or_name)
    tenant.limits = limits.model_dump(exclude_none=True)
    return tenant


async def create_key(
    session: WriteSession,
    tenant_id: str | None,
    name: str,
    scopes: Collection[str] = ("all",),
    expires_at: int | None = None,
    new: NewKey | None = None,
) -> CreatedKey:
    """A tenant's key, or an operator's when `tenant_id` is None; `expires_at` in milliseconds;
    `new` is by default a random one.

    Raises NotFound (tenant), BadRequest (unknown scope).
    """
    if tenant_id is not None:
        await find_tenant(session, tenant_id)
        if unknown := sorted(set(scopes) - TENANT_SCOPES):
            raise BadRequest(
                f"Unknown scope: '{unknown[0]}'. Known are all, read, and :read or :write of "
                f"{', '.join(RESOURCES)}.",
                param="scopes",
            )
    new = new or generate_key()
    key = ApiKey(
        id=new_id("key"),
        tenant_id=tenant_id,
        name=name,
        hash=new.hash,
        hint=new.hint,
        scopes=sorted(set(scopes)) if tenant_id is not None else list(ADMIN_SCOPES),
        created_at=now_ms(),
        expires_at=expires_at,
    )
    TenantRepository(session).add(key)
    await session.flush()
    return CreatedKey(key, new.secret)


async def revoke_key(session: WriteSession, key_id: str) -> ApiKey:
    """At once and for good; revoking again changes nothing. Raises NotFound."""
    key = await _key(session, key_id)
    if key.revoked_at is None:
        key.revoked_at = now_ms()
    return key


async def rotate_key(
    session: WriteSession, key_id: str, overlap_seconds: int, new: NewKey | None = None
) -> CreatedKey:
    """A new key with the same rights; the old one works for `overlap_seconds` more.

    Raises NotFound, Conflict when the old key is revoked.
    """
    old = await _key(session, key_id)
    if old.revoked_at is not None:
        raise Conflict("This key is revoked.", code="key_revoked")
    created = await create_key(session, old.tenant_id, old.name, old.scopes, new=new)
    ends = now_ms() + overlap_seconds * 1000
    old.expires_at = ends if old.expires_at is None else min(ends, old.expires_at)
    return created


async def secret_of(session: WriteSession, deployment_key: bytes, key_id: str, seed: str) -> str:
    """Of a key that was derived from `seed`. Raises Conflict when it was by another deployment
    key."""
    new = derive_key(deployment_key, seed)
    if (await _key(session, key_id)).hash != new.hash:
        raise Conflict(
            "This key's secret cannot be shown again: BATTEN_SECRET_KEY (or secret.key in the "
            "data directory) has changed since. Please rotate the key.",
            code="secret_not_available",
        )
    return new.secret


async def _key(session: WriteSession, key_id: str) -> ApiKey:
    key = await TenantRepository(session).key(key_id)
    if key is None:
        raise NotFound(f"No such key: '{key_id}'.")
    return key
