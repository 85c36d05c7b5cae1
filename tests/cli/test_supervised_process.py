"""One child under supervision: restarts, ends, and what happens when the supervisor is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from gateway.cli.supervisor.backoff import Backoff
from gateway.cli.supervisor.guard import Guard
from gateway.cli.supervisor.logs import LogSink
from gateway.cli.supervisor.process import Child, ChildEnded, ChildSpec

BOUND = 20.0
STUBBORN = (
    "import signal, time;"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('up', flush=True); time.sleep(99)"
)
PARENT = (
    "import subprocess, sys, time;"
    "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)']);"
    "print(p.pid, flush=True); time.sleep(99)"
)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(BOUND):
        while not condition():  # noqa: ASYNC110 - the other side is a process
            await asyncio.sleep(0.01)


def spec(script: str, stop_seconds: float = 5.0) -> ChildSpec:
    return ChildSpec("child", (sys.executable, "-c", script), dict(os.environ), stop_seconds)


@pytest.fixture
async def guard():
    guard = Guard()
    await guard.start()
    yield guard
    await guard.close()


@pytest.fixture
def make(guard: Guard, tmp_path: Path):
    def make(script: str, ended: list[ChildEnded] | None = None, **options: float) -> Child:
        report = (ended if ended is not None else []).append
        return Child(spec(script, **options), guard, LogSink(tmp_path / "child.log"), report)

    return make


async def test_what_dies_is_started_again(make, tmp_path: Path) -> None:
    ended: list[ChildEnded] = []
    child = make("import time; print('up', flush=True); time.sleep(99)", ended)
    child.start()
    await until(lambda: child.tail == ["up"])
    first = child.pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: child.pid != first and child.tail == ["up"])
    await child.stop()
    (told,) = ended
    assert (told.how, told.failures, told.delay) == ("was killed by SIGKILL", 1, 0.5)
    assert (tmp_path / "child.log").read_text() == "up\nup\n"
    assert not psutil.pid_exists(child.pid)


async def test_a_child_that_ignores_sigterm_is_killed(make) -> None:
    child = make(STUBBORN, stop_seconds=0.2)
    child.start()
    await until(lambda: child.tail == ["up"])
    await asyncio.wait_for(child.stop(), BOUND)
    assert not psutil.pid_exists(child.pid)


async def test_grandchildren_end_with_their_parent(make) -> None:
    child = make(PARENT)
    child.start()
    await until(lambda: child.tail)
    grandchild = int(child.tail[0])
    await child.stop()
    await until(lambda: not alive(grandchild))


async def test_stopping_before_it_has_begun(make) -> None:
    child = make("import time; time.sleep(99)")
    child.start()
    await asyncio.wait_for(child.stop(), BOUND)
    assert child.pid is None or not psutil.pid_exists(child.pid)


SUPERVISOR = """
import asyncio, os, sys
from pathlib import Path
from gateway.cli.supervisor.guard import Guard
from gateway.cli.supervisor.logs import LogSink
from gateway.cli.supervisor.process import Child, ChildSpec

async def main():
    guard = Guard()
    await guard.start()
    argv = (sys.executable, "-c", sys.argv[2])
    spec = ChildSpec("child", argv, dict(os.environ), 5.0)
    child = Child(spec, guard, LogSink(Path(sys.argv[1]) / "child.log"), print)
    child.start()
    await asyncio.sleep(99)

asyncio.run(main())
"""


@pytest.mark.parametrize("script", [STUBBORN, PARENT], ids=["stubborn", "with-grandchild"])
def test_nothing_survives_a_killed_supervisor(tmp_path: Path, script: str) -> None:
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(tmp_path), script])
    log = tmp_path / "child.log"
    wait_for(lambda: log.exists() and log.read_text().endswith("\n"))
    family = psutil.Process(supervisor.pid).children(recursive=True)
    assert len(family) >= 2
    supervisor.kill()
    supervisor.wait()
    wait_for(lambda: not any(alive(process.pid) for process in family))


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_backoff_doubles_up_to_ten_seconds_and_forgets() -> None:
    backoff, delays = Backoff(), []
    for _ in range(7):
        backoff = backoff.after(0.1)
        delays.append(backoff.delay)
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert backoff.after(60.0).delay == 0.5


def test_a_log_is_bounded_and_keeps_its_last_lines(tmp_path: Path) -> None:
    sink = LogSink(tmp_path / "x.log", rotate_bytes=100)
    for number in range(60):
        sink.write(f"line {number:03d}\n".encode())
    sink.write(b"unfinished")
    sink.close()
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["x.log", "x.log.1", "x.log.2", "x.log.3"]
    assert all(path.stat().st_size <= 100 for path in tmp_path.iterdir())
    assert sink.tail()[-2:] == ["line 059", "unfinished"]
