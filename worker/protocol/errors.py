"""Errors that both adapter loading and the engine speak of.

AdapterLoadError    an adapter that cannot serve
"""

from __future__ import annotations

from typing import Literal

AdapterErrorCode = Literal["adapter_unavailable", "adapter_invalid", "store_unavailable"]


class AdapterLoadError(Exception):
    """An adapter that cannot serve. `code` is `adapter_unavailable` (try again elsewhere),
    `store_unavailable` (nobody can say yet: try again later) or `adapter_invalid` (never will)."""

    def __init__(self, code: AdapterErrorCode, message: str) -> None:
        super().__init__(message)
        self.code: AdapterErrorCode = code
