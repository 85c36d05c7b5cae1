"""Children that end with their parent, even when it is killed (Linux)."""

from __future__ import annotations

import ctypes
import signal
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1


def die_with_parent(**_: Any) -> None:
    """A signal receiver: call it in the child."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
