"""Hugging Face publishes a package named `kernels` too: make sure that ours is imported."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import worker
from worker.runtime.errors import WrongKernels


def check_own_kernels() -> None:
    """Raises WrongKernels unless `kernels` lies beside `worker`."""
    ours = _folder(worker.__file__).parent / "kernels"
    spec = find_spec("kernels")
    found = _folder(spec.origin) if spec is not None else None
    if found != ours:
        raise WrongKernels(
            f"`kernels` is imported from {found or 'nowhere'} instead of {ours}: another package "
            "of that name is installed; run `pip uninstall kernels` and reinstall batten"
        )


def _folder(file: str | None) -> Path:
    return Path(file or "").resolve().parent
