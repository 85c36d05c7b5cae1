"""From a bearer secret to whoever is asking."""

from __future__ import annotations

import hmac

from pydantic import SecretStr

from gateway.auth.keys import hash_key
from gateway.auth.limits import Limits
from gateway.auth.principal import Operator, Principal
from gateway.auth.repository import CredentialRepository
from gateway.errors import Forbidden, Unauthorized
from gateway.kit.clock import now_ms
from gateway.kit.database import ReadSession


def bearer_secret(authorization: str | None) -> str:
    """Raises Unauthorized."""
    scheme, _, secret = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not secret.strip():
        raise Unauthorized(
            "You didn't provide an API key. Send it in the Authorization header as "
            "'Bearer YOUR_KEY'."
        )
    return secret.strip()


def is_admin_key(secret: str, admin_key: SecretStr | None) -> bool:
    expected = admin_key.get_secret_value() if admin_key else ""
    return bool(expected) and hmac.compare_digest(secret.encode(), expected.encode())


async def authenticate(session: ReadSession, secret: str) -> Principal | Operator:
    """Raises Unauthorized for an unknown, expired or revoked key; Forbidden for a suspended
    tenant."""
    found = await CredentialRepository(session).find(hash_key(secret))
    if found is None:
        raise _incorrect(secret)
    key, tenant = found
    if key.state(now_ms()) != "active":
        raise _incorrect(secret)
    if tenant is None:
        return Operator(key.id)
    if tenant.suspended_at is not None:
        raise Forbidden("This account is suspended.", code="account_suspended")
    limits = Limits.model_validate(tenant.limits)
    return Principal(tenant.id, key.id, frozenset(key.scopes), limits)


def _incorrect(secret: str) -> Unauthorized:
    shown = f"{secret[:3]}***{secret[-4:]}" if len(secret) > 20 else "***"
    return Unauthorized(f"Incorrect API key provided: {shown}.")
