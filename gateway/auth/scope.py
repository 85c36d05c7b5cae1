"""Whose rows a query may touch.

A repository of tenant data is built from a TenantScope, and only this package mints one, so
that a query across tenants cannot be written by accident.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TenantScope:
    tenant_id: str


@dataclass(frozen=True, slots=True)
class SharedScope:
    """What the operator owns, to be granted to tenants: only admin endpoints use it."""

    tenant_id: None = None


SHARED = SharedScope()


def scope_for_background(tenant_id: str) -> TenantScope:
    """For the control and collector processes, which act for the tenant that a row names."""
    return TenantScope(tenant_id)
