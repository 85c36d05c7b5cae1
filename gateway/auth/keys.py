"""API keys: 256 random bits, shown once, kept as sha256.

A plain hash is enough for a secret that cannot be guessed; it also makes the look-up one probe
of a unique index, whose timing says nothing about the secret.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class NewKey:
    secret: str = field(repr=False)
    hash: str
    hint: str


def generate_key() -> NewKey:
    secret = f"bt_{secrets.token_urlsafe(32)}"
    return NewKey(secret, hash_key(secret), f"{secret[:6]}…{secret[-4:]}")


def hash_key(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
