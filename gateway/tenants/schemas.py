from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway.auth.limits import Limits
from gateway.kit.clock import seconds
from gateway.models import ApiKey, Tenant

Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f]+$")]


class CreateTenant(BaseModel):
    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"example": {"name": "acme", "weight": 1.0}}
    )

    name: Name
    weight: float = Field(1.0, gt=0, le=1000, description="Fair share in the queue")


class UpdateTenant(BaseModel):
    model_config = ConfigDict(extra="forbid")

    weight: float | None = Field(None, gt=0, le=1000)
    suspended: bool | None = None


class TenantObject(BaseModel):
    id: str
    object: Literal["tenant"] = "tenant"
    name: str
    weight: float
    created_at: int
    suspended_at: int | None


class SetLimits(Limits):
    """All limits of a tenant: what is left out is unlimited."""

    tenant: str = Field(description="Id or name")


class LimitsObject(Limits):
    id: str = Field(description="The tenant's")
    object: Literal["limits"] = "limits"
    tenant: str


class CreateKey(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"example": {"tenant": "acme", "name": "ci", "scopes": ["all"]}},
    )

    tenant: str | None = Field(None, description="Id or name; null with `admin`")
    name: Name = "key"
    scopes: list[str] = Field(["all"], min_length=1)
    admin: bool = Field(False, description="An operator's key, of no tenant")
    expires_at: int | None = Field(None, gt=0, le=2**40, description="Unix seconds")


class RotateKey(BaseModel):
    model_config = ConfigDict(extra="forbid")

    overlap_seconds: int = Field(
        86_400, ge=0, le=30 * 86_400, description="How long the old key still works"
    )


class KeyObject(BaseModel):
    id: str
    object: Literal["api_key"] = "api_key"
    tenant_id: str | None
    name: str
    hint: str
    scopes: list[str]
    created_at: int
    expires_at: int | None
    revoked_at: int | None


class NewKeyObject(KeyObject):
    secret: str = Field(description="Shown once: it is not kept")


def show_tenant(tenant: Tenant) -> TenantObject:
    return TenantObject(
        id=tenant.id,
        name=tenant.name,
        weight=tenant.weight,
        created_at=tenant.created_at // 1000,
        suspended_at=seconds(tenant.suspended_at),
    )


def show_limits(tenant: Tenant) -> LimitsObject:
    return LimitsObject(id=tenant.id, tenant=tenant.name, **tenant.limits)


def show_key(key: ApiKey) -> KeyObject:
    return KeyObject(
        id=key.id,
        tenant_id=key.tenant_id,
        name=key.name,
        hint=key.hint,
        scopes=key.scopes,
        created_at=key.created_at // 1000,
        expires_at=seconds(key.expires_at),
        revoked_at=seconds(key.revoked_at),
    )
