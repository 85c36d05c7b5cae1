"""The Makefile and its scripts, as far as they go without a network."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("venv", "lint", "test", "test-full", "serve", "demo", "bench", "clean")


def run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=30
    )


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_parses(target: str) -> None:
    done = run("make", "--dry-run", target)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_help_lists_every_target() -> None:
    listed = [line.split()[0] for line in run("make", "help").stdout.splitlines()]
    assert set(TARGETS) <= set(listed)


def test_a_model_of_ones_own_makes_no_demo_model() -> None:
    assert "smollm2.py" in run("make", "--dry-run", "--always-make", "demo", BATTEN_MODEL="").stdout
    own = run("make", "--dry-run", "--always-make", "demo", BATTEN_MODEL="/models/own")
    assert "smollm2.py" not in own.stdout


def test_preflight_is_content_with_this_machine() -> None:
    done = run(".ci/preflight")
    assert (done.returncode, done.stdout) == (0, "")


def test_preflight_names_what_is_missing_and_how_to_get_it() -> None:
    done = run(".ci/preflight", PYTHON="no-such-python")
    assert done.returncode == 1
    assert "Python 3.11 or later (no-such-python is absent)" in done.stderr
    assert "nstall" in done.stderr.splitlines()[-1]


def test_packages_that_cannot_be_had_are_explained(tmp_path: Path) -> None:
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for name in ("python", "pip"):
        (binaries / name).write_text("#!/bin/sh\nexit 1\n")
        (binaries / name).chmod(0o755)
    done = run(".ci/install", VENV=str(tmp_path))
    assert done.returncode == 1
    assert "PIP_INDEX_URL=" in done.stderr


def test_ci_runs_the_tests() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "set -euo pipefail" in script
    assert "make test" in script


@pytest.mark.parametrize("name", ["run", "preflight", "install", "stage", "find-python"])
def test_scripts_are_executable_and_parse(name: str) -> None:
    path = ROOT / ".ci" / name
    assert os.access(path, os.X_OK)
    shell = "sh" if "#!/bin/sh" in path.read_text() else "bash"
    assert run(shell, "-n", str(path)).returncode == 0
