"""What the examples start ends with them, and is not taken for what another one started."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from gateway.cli.supervisor.data_lock import locked
from tests.gateway.conftest import write_tiny_model

EXAMPLES = Path(__file__).parents[2] / "examples"

HOLDER = """
import subprocess, sys, time
from stack import ended_with_us

with ended_with_us() as guard:
    group = subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    guard.write(f"+{group.pid}\\n")
    group.stdout.readline()
    print(group.pid, flush=True)
    time.sleep(600)
"""


def test_nothing_outlives_a_script_that_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], cwd=EXAMPLES, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        group = psutil.Process(int(holder.stdout.readline()))
        holder.kill()
    group.wait(30)
    assert not group.is_running()


def test_a_port_that_another_stack_has(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "serve.py", "--port", str(port), "--data", tmp_path / "data"],
            cwd=EXAMPLES,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert f"port {port} is taken" in done.stderr + done.stdout
    assert not (tmp_path / "data").exists()


def test_a_data_directory_in_use_is_refused_and_its_log_kept(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "up.log").write_text("of the one that runs\n")
    with locked(data):
        done = subprocess.run(
            [sys.executable, "serve.py", "--port", str(free_port()), "--data", data],
            cwd=EXAMPLES,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    output = " ".join((done.stderr + done.stdout).split())
    assert f"(pid {os.getpid()}) runs on" in output
    assert "Traceback" not in output
    assert (data / "up.log").read_text() == "of the one that runs\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_whoever_stops_it_is_told_when_it_has(tmp_path: Path, number: int) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    words = ["serve.py", "--port", str(free_port()), "--model", model, "--data", tmp_path / "data"]
    with subprocess.Popen(
        [sys.executable, *words],
        cwd=EXAMPLES,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as serving:
        assert serving.stdout is not None
        assert serving.stdout.readline().startswith("starting ")
        serving.send_signal(number)
        said = serving.stdout.read()
    assert (serving.returncode, said.splitlines()[-1]) == (0, "stopped; nothing is left running")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
