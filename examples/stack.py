"""Run a whole Batten on this machine for as long as a block lasts."""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx

from gateway.cli.errors import CommandError, DataLocked
from gateway.cli.ports import check_free
from gateway.cli.supervisor import guard_main
from gateway.cli.supervisor.data_lock import locked

START_SECONDS = 180.0
STOP_SECONDS = 60.0
TAIL_LINES = 15


class StackError(Exception):
    """The stack did not start; the message says what it printed and where to look."""


@dataclass(frozen=True)
class Stack:
    """A running `batten up`: where it listens, its operator's key and its data directory."""

    url: str
    admin_key: str
    data: Path


@contextmanager
def running_stack(model: Path, model_name: str, data: Path, port: int) -> Iterator[Stack]:
    """Start `batten up`, wait until a worker serves, and stop every process at the end."""
    require_free(port)
    require_unused(data)
    admin_key = kept_secret(data / "admin.key")
    log = data / "up.log"
    command = [sys.executable, "-m", "gateway", "up", "--model", str(model)]
    command += ["--model-name", model_name, "--data", str(data), "--port", str(port)]
    with ended_with_us() as guard:
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "BATTEN_ADMIN_KEY": admin_key},
                start_new_session=True,
            )
        try:
            guard.write(f"+{process.pid}\n")
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(process, url, admin_key, log)
            yield Stack(url, admin_key, data)
        except KeyboardInterrupt:
            print("\nstopping …", flush=True)  # which takes seconds
            raise
        finally:
            stop(process)
            guard.write(f"-{process.pid}\n")


def require_free(port: int) -> None:
    """Another stack that answers there would be taken for the one that is starting."""
    try:
        check_free("127.0.0.1", port)
    except CommandError as error:
        raise StackError(
            f"port {port} is taken, perhaps by another `make serve`: stop that one, or run "
            "`.venv/bin/python examples/serve.py --port PORT --data FOLDER`"
        ) from error


def require_unused(data: Path) -> None:
    """Of another stack that runs there the log would be emptied. Makes the folder."""
    try:
        with locked(data):
            pass
    except DataLocked as error:
        raise StackError(
            f"{error.message} (`make serve` and `make demo` share .demo; examples/serve.py and "
            "examples/demo.py take --data)"
        ) from error
    except CommandError as error:
        raise StackError(error.message) from error


@contextmanager
def ended_with_us() -> Iterator[IO[str]]:
    """Write `+PGID` to have a process group killed once this process is gone, even by SIGKILL."""
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", guard_main.__file__],
        stdin=subprocess.PIPE,
        text=True,
        bufsize=1,
        start_new_session=True,
    )
    with guard:  # closes its standard input and waits
        assert guard.stdin is not None
        yield guard.stdin


def kept_secret(path: Path) -> str:
    """A random operator's key, made once and readable by its owner only."""
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text(f"bt_admin_{secrets.token_urlsafe(32)}")
    return path.read_text()


def wait_until_ready(
    process: "subprocess.Popen[bytes]", url: str, admin_key: str, log: Path
) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise StackError(f"`batten up` ended with status {process.returncode}:\n{tail(log)}")
        if is_ready(url, admin_key):
            return
        time.sleep(0.2)
    raise StackError(f"no worker was ready after {START_SECONDS:.0f} s:\n{tail(log)}")


def is_ready(url: str, admin_key: str) -> bool:
    """Whether the API answers and a worker has announced itself."""
    headers = {"Authorization": f"Bearer {admin_key}"}
    try:
        response = httpx.get(f"{url}/v1/admin/workers", headers=headers, timeout=5)
    except httpx.TransportError:
        return False
    return response.status_code == 200 and bool(response.json()["data"])


def tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join([*lines[-TAIL_LINES:], f"(whole log: {log})"])


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Ask, then insist; a second Ctrl-C while it stops must not leave anything behind."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    finally:
        signal.signal(signal.SIGINT, previous)
