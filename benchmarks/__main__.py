"""`python -m benchmarks`: those that need nothing but this machine, one after another.

With BATTEN_MODEL (a local folder) the engine runs on a made workload; with BATTEN_WORKLOAD on
that folder's requests.jsonl. See each file for its own options.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def commands() -> list[list[str]]:
    found = [["engine/scheduler.py"], ["queue/claim.py"]]
    model, workload = os.environ.get("BATTEN_MODEL"), os.environ.get("BATTEN_WORKLOAD")
    if model:
        found.append(["engine/w1.py", *([workload] if workload else []), "--model", model])
    return found


def main() -> int:
    environment = {**os.environ, "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
    failed = []
    for file, *arguments in commands():
        print(f"\n{file} (load average {os.getloadavg()[0]:.1f})", flush=True)
        command = [sys.executable, str(HERE / file), *arguments]
        if subprocess.run(command, env=environment, check=False).returncode:
            failed.append(file)
    if failed:
        print(f"\nfailed: {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
