"""Who is asking, and what they may do.

A tenant key's scopes are `all`, `read` (every GET), or `resource:read` and `resource:write`,
where the resource is what follows /v1/ in the path, and `chat/completions` and `completions`
are both `inference`. Write includes read. An operator's key has the scope `admin` alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gateway.auth.limits import UNLIMITED, Limits
from gateway.auth.scope import TenantScope

Access = Literal["read", "write"]

RESOURCES = (
    "adapters",
    "batches",
    "budget",
    "files",
    "inference",
    "invoices",
    "jobs",
    "models",
    "usage",
    "webhook_endpoints",
    "webhook_events",
)
_OTHERWISE = {
    "chat": "inference",
    "completions": "inference",
    "webhook_event_types": "webhook_endpoints",
}
TENANT_SCOPES = frozenset(
    {"all", "read", *(f"{name}:{access}" for name in RESOURCES for access in ("read", "write"))}
)


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated tenant."""

    tenant_id: str
    key_id: str
    scopes: frozenset[str]
    limits: Limits = UNLIMITED

    @property
    def scope(self) -> TenantScope:
        return TenantScope(self.tenant_id)

    def may(self, access: Access, resource: str) -> bool:
        granting = {"all", f"{resource}:write"}
        if access == "read":
            granting |= {"read", f"{resource}:read"}
        return not granting.isdisjoint(self.scopes)


@dataclass(frozen=True, slots=True)
class Operator:
    """Whoever runs this deployment. `key_id` is "admin" for the key of the settings."""

    key_id: str


def resource_of(path: str) -> str:
    """`/v1/files/file_1/content` → "files"."""
    name = path.removeprefix("/v1/").partition("/")[0]
    return _OTHERWISE.get(name, name)
