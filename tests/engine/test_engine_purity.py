"""The deciding half of the engine runs without torch, web, SQL or broker."""

from __future__ import annotations

import subprocess
import sys

FOREIGN = {
    "torch",
    "transformers",
    "safetensors",
    "triton",
    "numpy",
    "pydantic",
    "sqlalchemy",
    "fastapi",
    "redis",
    "httpx",
}


def test_engine_and_null_runner_import_nothing_heavy() -> None:
    code = (
        "import sys, worker.engine.engine, worker.engine.null_runner;"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True
    )
    assert not FOREIGN & set(result.stdout.split())
