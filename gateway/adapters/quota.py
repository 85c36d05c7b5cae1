"""How many adapters a tenant may keep, and how large."""

from __future__ import annotations

from gateway.adapters.repository import AdapterRepository
from gateway.auth.principal import Principal
from gateway.errors import TooManyRequests
from gateway.kit.database import WriteSession
from gateway.settings import Settings


async def check_quota(session: WriteSession, principal: Principal, settings: Settings) -> None:
    """With the upload's rows added and the tenant locked. Raises TooManyRequests."""
    limits = principal.limits
    adapters, size = await AdapterRepository(session, principal.scope).holdings()
    most = limits.adapters or settings.tenant_adapters
    if adapters > most:
        raise TooManyRequests(
            f"You have {most} adapters, which is your limit. Please delete one first.",
            code="adapters_exceeded",
        )
    most = limits.adapter_bytes or settings.tenant_adapter_bytes
    if size > most:
        raise TooManyRequests(
            f"Your adapters would take {size} bytes; your limit is {most}. Please delete one.",
            code="adapter_bytes_exceeded",
        )
