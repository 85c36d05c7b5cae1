"""How compute threads wait for each other."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

SPINS = 3000
"""Of the runtime's loop, some 30 microseconds: what lies between most of a step's products."""


def wait_politely(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let idle compute threads spin shortly, then sleep. Call before torch is imported.

    A step has hundreds of products that take as long as it takes to wake a thread. But a worker
    shares its cores with the rest of the stack, and a thread that spins long keeps its core from
    the very thread it waits for. What the operator has set stays.
    """
    if not environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        environ["GOMP_SPINCOUNT"] = str(SPINS)
