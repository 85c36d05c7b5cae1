from __future__ import annotations

import subprocess
import sys


def test_the_gateway_never_loads_torch() -> None:
    program = (
        "import sys, gateway.app, gateway.__main__, gateway.adapters.ingest\n"
        "print([m for m in ('torch', 'transformers', 'safetensors', 'triton', 'kernels', "
        "'worker.engine') if m in sys.modules])"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.strip() == "[]"
