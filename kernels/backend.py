"""Which implementation of an op runs.

CUDA and HIP tensors    Triton where it is installed, else the reference
CPU tensors             the C++ kernel where the op has one and it compiles, else the reference

BATTEN_TRITON_KERNELS=0 and BATTEN_NATIVE_KERNELS=0 switch the first choice off.
"""

from __future__ import annotations

import functools
import importlib.util
import os


def triton_serves(device: str) -> bool:
    """Whether ops on this type of device run in Triton. PyTorch calls HIP devices "cuda" too."""
    return device == "cuda" and _has_triton()


@functools.cache
def _has_triton() -> bool:
    if os.environ.get("BATTEN_TRITON_KERNELS") == "0":
        return False
    return importlib.util.find_spec("triton") is not None
