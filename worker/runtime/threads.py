"""How compute threads wait for each other."""

from __future__ import annotations

import os
from collections.abc import MutableMapping


def wait_politely(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let idle compute threads sleep instead of spinning. Call before torch is imported.

    A worker shares its cores with the rest of the stack. A thread that spins at a barrier keeps
    its core from the very thread it waits for: beside other busy processes steps then take ten
    times as long. What the operator has set stays.
    """
    if "GOMP_SPINCOUNT" not in environ:
        environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
