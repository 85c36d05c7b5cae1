"""URLs of servers, for people to read."""

from __future__ import annotations

import re

_PARAMETER = re.compile(r"([?&](?:ssl_?)?password=)[^&#]*", re.IGNORECASE)


def masked(url: str) -> str:
    """`redis://user:secret@host/0` → `redis://user:********@host/0`; `?password=` likewise."""
    scheme, separator, rest = _PARAMETER.sub(r"\1********", url).partition("://")
    credentials, at, host = rest.rpartition("@")
    if not at:
        return f"{scheme}{separator}{rest}"
    user = credentials.partition(":")[0]
    return f"{scheme}{separator}{user}:********@{host}"
