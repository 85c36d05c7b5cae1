"""What `make serve` starts, for the documents' snippets to run against as they stand."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODEL = ROOT / ".cache" / "smollm2-135m-instruct"
ADDRESS = "127.0.0.1:8400"
START_SECONDS = 120.0
SECONDS = 120.0
STOP_SECONDS = 90.0

needs_model = pytest.mark.skipif(not MODEL.is_dir(), reason="the demo model is not made")


def snippets(document: str, language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```$", document, re.MULTILINE | re.DOTALL)
    return [str(text) for text in found]


@dataclass(frozen=True)
class Served:
    """A running server, and a folder that looks like a checkout to who works in it."""

    address: str
    folder: Path
    environment: dict[str, str]

    def run(self, *command: str, text: str) -> str:
        done = subprocess.run(
            command,
            input=text.replace(ADDRESS, self.address),
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """examples/serve.py with the engine that computes nothing: tokens are arbitrary."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / ".cache").symlink_to(MODEL.parent)
    port = free_port()
    log = folder / "serve.log"
    with log.open("wb") as output:
        command = [sys.executable, "examples/serve.py", "--model", MODEL]
        process = subprocess.Popen(
            [*command, "--data", ".demo", "--port", str(port)],
            cwd=folder,
            env=environment(BATTEN_ENGINE="null", BATTEN_WEBHOOK_ALLOW_PRIVATE="1"),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        operator, tenant = printed_keys(process, log)
        address = f"127.0.0.1:{port}"
        keys = {"BATTEN_ADMIN_KEY": operator, "BATTEN_API_KEY": tenant, "PATH": activated()}
        yield Served(address, folder, environment(BATTEN_URL=f"http://{address}", **keys))
    finally:
        process.terminate()
        assert process.wait(STOP_SECONDS) == 0, log.read_text()


def environment(**given: str) -> dict[str, str]:
    settings = ("BATTEN_", "DATABASE_URL", "REDIS_URL", "LOG_LEVEL", "OPENAI_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(settings)}
    return {**kept, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **given}


def activated() -> str:
    """What `source .venv/bin/activate` makes of PATH."""
    return os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ["PATH"]])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def printed_keys(process: subprocess.Popen[bytes], log: Path) -> tuple[str, str]:
    """Those of the operator and of the first tenant, once everything is ready."""
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        text = log.read_text()
        if "\ntry: curl" in text:
            operator = re.search(r"^  operator +(\S+)$", text, re.MULTILINE)
            tenant = re.search(r"^  northwind +(\S+)  \(model: triage\)$", text, re.MULTILINE)
            assert operator, text
            assert tenant, text
            return operator[1], tenant[1]
        time.sleep(0.05)
    raise AssertionError(log.read_text())
