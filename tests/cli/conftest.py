"""The `batten` command as a process, in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Batten = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """This process's, without its settings; data in a temporary directory."""
    settings = ("BATTEN_", "DATABASE_URL", "REDIS_URL", "LOG_LEVEL")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(settings)}
    return {**kept, "BATTEN_DATA": str(tmp_path / "data"), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


@pytest.fixture
def batten(environment: dict[str, str]) -> Batten:
    def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "gateway", *args],
            env={**environment, **env},
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run
