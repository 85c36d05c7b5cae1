"""The Triton kernels build for GPUs that are not here, and fit them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
REGISTERS = {"sm_80": 255, "sm_90": 255, "sm_100": 255, "gfx942": 256}
SHARED = 64 * 1024  # the least that one of the targets gives a block: gfx942's


@pytest.mark.full
def test_every_kernel_fits_every_target_without_spilling(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.kernels.compile_ahead"],
        cwd=ROOT,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    sys.stdout.write(done.stdout)
    used = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(used) == 14 * len(REGISTERS)
    for line in used:
        assert line["registers"] <= REGISTERS[line["target"]], line
        assert line["spills"] == 0, line
        assert line["shared"] <= SHARED, line
