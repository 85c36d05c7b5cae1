"""Typed parameters of endpoints: `CurrentPrincipal` for tenants, `AdminPrincipal` for
operators."""

from __future__ import annotations

from typing import Annotated

import structlog
from fastapi import Depends, Request
from fastapi.security import HTTPBearer

from gateway.auth.principal import Access, Operator, Principal, resource_of
from gateway.auth.service import authenticate, bearer_secret, is_admin_key
from gateway.errors import Forbidden
from gateway.kit.dependencies import AppContext

_documented = HTTPBearer(auto_error=False, description="An API key, `bt_…`")


async def _caller(request: Request, context: AppContext) -> Principal | Operator:
    secret = bearer_secret(request.headers.get("authorization"))
    if is_admin_key(secret, context.settings.admin_key):
        return Operator("admin")
    async with context.database.read() as session:
        return await authenticate(session, secret)


_Caller = Annotated[Principal | Operator, Depends(_caller)]


async def current_principal(request: Request, caller: _Caller) -> Principal:
    if isinstance(caller, Operator):
        raise Forbidden("An admin key belongs to no tenant: use a tenant's key here.")
    access: Access = "read" if request.method in {"GET", "HEAD"} else "write"
    resource = resource_of(request.url.path)
    if not caller.may(access, resource):
        raise Forbidden(f"This key lacks the scope {resource}:{access}.")
    structlog.contextvars.bind_contextvars(tenant_id=caller.tenant_id, key_id=caller.key_id)
    return caller


async def current_operator(caller: _Caller) -> Operator:
    if not isinstance(caller, Operator):
        raise Forbidden("This needs an admin key.")
    structlog.contextvars.bind_contextvars(operator=caller.key_id)
    return caller


CurrentPrincipal = Annotated[Principal, Depends(_documented), Depends(current_principal)]
AdminPrincipal = Annotated[Operator, Depends(_documented), Depends(current_operator)]
