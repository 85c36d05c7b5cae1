"""API keys: 256 random bits, shown once, kept as sha256.

A plain hash is enough for a secret that cannot be guessed; it also makes the look-up one probe
of a unique index, whose timing says nothing about the secret.

A key that may have to be shown again, to the same call with the same Idempotency-Key, is derived
from a random seed, which is kept for so long, and the deployment's secret key: the database alone
tells no key, and once the seed is forgotten nothing does.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class NewKey:
    secret: str = field(repr=False)
    hash: str
    hint: str


def generate_key() -> NewKey:
    return _new(secrets.token_bytes(32))


def new_seed() -> str:
    return secrets.token_hex(32)


def derive_key(deployment_key: bytes, seed: str) -> NewKey:
    """The same for the same two."""
    return _new(hmac.digest(deployment_key, f"api key {seed}".encode(), "sha256"))


def hash_key(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _new(bits: bytes) -> NewKey:
    secret = f"bt_{base64.urlsafe_b64encode(bits).rstrip(b'=').decode()}"
    return NewKey(secret, hash_key(secret), f"{secret[:6]}…{secret[-4:]}")
