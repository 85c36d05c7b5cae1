"""Signing secrets, derived and never stored: HMAC-SHA256 of a row's id, keyed by the deployment.

A copy of the database signs nothing. The row keeps a digest, so that another key than the one a
secret was made with is noticed, and not signed with.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from dataclasses import dataclass, field

from gateway.kit.ids import new_id
from gateway.models import WebhookSecret

PREFIX = "whsec_"


class WrongSecretKey(Exception):
    """The deployment's secret key is not the one that this secret was made with."""


@dataclass(frozen=True, slots=True)
class Secret:
    """`key` is what HMAC takes; `text` is what the tenant is shown, once."""

    key: bytes = field(repr=False)

    @property
    def text(self) -> str:
        return PREFIX + base64.b64encode(self.key).decode()

    @property
    def hint(self) -> str:
        return f"{PREFIX}…{self.text[-5:-1]}"

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.key).hexdigest()


def new_secret(
    deployment_key: bytes, tenant_id: str, endpoint_id: str | None, now: int
) -> WebhookSecret:
    """A current secret's row, to add. Without an endpoint: the tenant's default."""
    secret_id = new_id("whs")
    secret = _derived(deployment_key, secret_id)
    return WebhookSecret(
        id=secret_id,
        tenant_id=tenant_id,
        endpoint_id=endpoint_id,
        digest=secret.digest,
        hint=secret.hint,
        created_at=now,
    )


def reveal(deployment_key: bytes, row: WebhookSecret) -> Secret:
    """Raises WrongSecretKey."""
    secret = _derived(deployment_key, row.id)
    if not hmac.compare_digest(secret.digest, row.digest):
        raise WrongSecretKey(
            "BATTEN_SECRET_KEY (or secret.key in the data directory) is not the one that webhook "
            "secrets were made with: give every process the same, or rotate the secrets"
        )
    return secret


def _derived(deployment_key: bytes, secret_id: str) -> Secret:
    return Secret(hmac.digest(deployment_key, f"webhook secret {secret_id}".encode(), "sha256"))
