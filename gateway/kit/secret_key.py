"""The deployment's own secret, from which others are derived.

`BATTEN_SECRET_KEY`, else 256 random bits in the data directory, made by the first process that
needs them and readable by its user alone.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from gateway.settings import Settings

FILE = "secret.key"


def load_secret_key(settings: Settings) -> bytes:
    if settings.secret_key is not None:
        return settings.secret_key.get_secret_value().encode()
    path = settings.data / FILE
    if not path.exists():
        _create(path)
    return path.read_bytes()


def _create(path: Path) -> None:
    """All of it appears, or nothing; of several processes at once one wins."""
    own = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(secrets.token_hex(32).encode())
    try:
        os.link(own, path)
    except FileExistsError:
        pass
    finally:
        os.unlink(own)
