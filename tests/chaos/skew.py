"""Wall clocks of running processes, set wrong one by one (`skew.c`)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

PROCESSES = ("gateway api", "gateway collector", "gateway control", "-m worker")
_SOURCE = Path(__file__).parent / "skew.c"


class Clocks:
    """`environment` is for the processes. Without a C compiler all clocks stay right."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "skew"
        self._file.write_bytes(bytes(8 * len(PROCESSES)))
        self.environment: dict[str, str] = {}
        if compiler := shutil.which("cc"):
            library = folder / "skew.so"
            command = [compiler, "-shared", "-fPIC", "-O2", "-o", library, _SOURCE, "-ldl"]
            subprocess.run(command, check=True)
            self.environment = {"LD_PRELOAD": str(library), "BATTEN_TEST_SKEW": str(self._file)}

    @property
    def can_be_wrong(self) -> bool:
        return bool(self.environment)

    def set(self, process: str, seconds: int) -> None:
        with self._file.open("r+b") as shared:
            shared.seek(8 * PROCESSES.index(process))
            shared.write(seconds.to_bytes(8, "little", signed=True))
