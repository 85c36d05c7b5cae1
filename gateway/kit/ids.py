"""Identifiers: a prefix that names the kind, then a ULID (sorted by time of creation).

The ULID (https://github.com/ulid/spec) is 48 bits of milliseconds and 80 random bits in
Crockford's base 32, here in lower case.
"""

from __future__ import annotations

import secrets

from gateway.kit.clock import now_ms

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def new_id(prefix: str) -> str:
    """`new_id("batch")` → "batch_01jd…" (26 characters after the underscore)."""
    number = (now_ms() << 80) | secrets.randbits(80)
    digits = [_ALPHABET[(number >> shift) & 31] for shift in range(125, -1, -5)]
    return f"{prefix}_{''.join(digits)}"
