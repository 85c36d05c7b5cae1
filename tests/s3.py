"""A real S3-compatible server (moto's), in a process of its own that may be stopped and frozen."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from tests.servers import START_SECONDS, dying_with_us, wait_until


class S3Server:
    """Serves on `port` once started, empty after every start."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._log = Path(tempfile.mkstemp(prefix="batten-s3-")[1])
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """As any tool of S3 takes it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "tests",
            "AWS_REGION": "us-east-1",
        }

    def start(self) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1"]
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [*dying_with_us(), *command, "-p", str(self.port)], stdout=output, stderr=output
            )
        wait_until(self._answers, self._process, self._log)

    def make_bucket(self, name: str) -> str:
        """Its URL."""
        urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/{name}", method="PUT"))
        return f"s3://{name}"

    def freeze(self) -> None:
        """Takes connections and never answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(START_SECONDS)
            self._process = None

    def close(self) -> None:
        self.stop()
        self._log.unlink()

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.endpoint}/moto-api/", timeout=1).close()
        except (urllib.error.URLError, OSError):
            return False
        return True
