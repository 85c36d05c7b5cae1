"""TCP ports: listening, and finding free ones."""

from __future__ import annotations

import errno
import secrets
import socket

from gateway.cli.errors import CommandError, PortTaken

# Below the range of ephemeral ports (Linux 32768, macOS 49152): a client that retries while the
# server is down could otherwise be given the server's own port as its source and connect to itself.
_FREE_PORTS = range(10_240, 32_000)
_TRIES = 100


def listen(host: str, port: int) -> socket.socket:
    """A bound, listening socket. Raises PortTaken or CommandError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(
                f"port {port} on {host} is taken by another process; "
                "stop it, or choose another with --port"
            ) from error
        raise CommandError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def check_free(host: str, port: int) -> None:
    """Raises PortTaken or CommandError."""
    listen(host, port).close()


def free_port(host: str = "127.0.0.1") -> int:
    """A port nobody listens on, outside the ephemeral range."""
    for _ in range(_TRIES):
        port = _FREE_PORTS.start + secrets.randbelow(len(_FREE_PORTS))
        try:
            check_free(host, port)
        except PortTaken:
            continue
        return port
    raise CommandError(f"no free TCP port on {host}")
