"""Headers of a message (https://github.com/standard-webhooks/standard-webhooks, "Signatures")."""

from __future__ import annotations

import base64
import hmac
from collections.abc import Sequence

from gateway.webhooks.secrets import Secret


def signed_headers(
    event_id: str, body: bytes, secrets: Sequence[Secret], now_seconds: int
) -> dict[str, str]:
    """One signature for each live secret: a receiver accepts any that it knows."""
    content = f"{event_id}.{now_seconds}.".encode() + body
    return {
        "webhook-id": event_id,
        "webhook-timestamp": str(now_seconds),
        "webhook-signature": " ".join(_signature(secret, content) for secret in secrets),
    }


def _signature(secret: Secret, content: bytes) -> str:
    return "v1," + base64.b64encode(hmac.digest(secret.key, content, "sha256")).decode()
