"""URLs of servers, for people to read."""

from __future__ import annotations


def masked(url: str) -> str:
    """`redis://user:secret@host/0` → `redis://user:********@host/0`."""
    scheme, separator, rest = url.partition("://")
    credentials, at, host = rest.rpartition("@")
    if not at:
        return url
    user = credentials.partition(":")[0]
    return f"{scheme}{separator}{user}:********@{host}"
