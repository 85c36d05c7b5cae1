"""C++ kernels, compiled at first use with the system's compiler, as Triton compiles its own.

They are compiled for the processor that they run on, so its widest instructions are used without
asking at run time. BATTEN_KERNEL_ARCH names another target, in the words of the compiler's -march.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

FLAGS = (
    "-O3",
    "-std=c++17",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-Wno-psabi",
)
HEADER = Path(__file__).with_name("lanes.h")

_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Where compiled kernels are kept: BATTEN_KERNEL_CACHE, else the user's cache folder."""
    configured = os.environ.get("BATTEN_KERNEL_CACHE")
    if configured:
        return Path(configured)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "batten" / "kernels"


def threads(work: int, enough: int) -> int:
    """Of a kernel's team: all that torch has where there is `enough` work for a second, else one.

    Never a part of them: GNU's OpenMP runtime ends the threads that a smaller team leaves out, and
    starts them again for the next larger one.
    """
    return torch.get_num_threads() if work > enough else 1


@functools.cache
def library(source: Path) -> ctypes.CDLL | None:
    """The compiled `source`, or None where it can't be compiled; the log then says why.

    BATTEN_NATIVE_KERNELS=0 switches native kernels off.
    """
    if os.environ.get("BATTEN_NATIVE_KERNELS") == "0":
        return None
    compiler = _compiler()
    if compiler is None:
        return None
    try:
        return ctypes.CDLL(str(_compiled(source, compiler)))
    except (OSError, subprocess.CalledProcessError) as error:
        output = getattr(error, "stderr", None) or str(error)
        name = f"{source.parent.name}/{source.name}"
        _log.warning("%s can't be compiled, PyTorch serves instead: %s", name, output.strip())
        return None


def function(source: Path, name: str, arguments: Sequence[Any]) -> Any:
    """A function without a result in the library of `source`, which must be there."""
    compiled = library(source)
    assert compiled is not None
    found = getattr(compiled, name)
    found.argtypes, found.restype = arguments, None
    return found


@functools.cache
def _compiler() -> str | None:
    found = shutil.which("g++") or shutil.which("clang++")
    if found is None:
        _log.warning("no g++ or clang++ on PATH: PyTorch serves instead of the faster C++ kernels")
    return found


def _compiled(source: Path, compiler: str) -> Path:
    """The shared library of this source, these flags and this kind of processor."""
    text = HEADER.read_bytes() + source.read_bytes()
    flags = (*FLAGS, f"-march={os.environ.get('BATTEN_KERNEL_ARCH', 'native')}")
    key = hashlib.sha256(repr((text, flags, compiler, _processor())).encode()).hexdigest()[:24]
    target = cache_folder() / f"{source.parent.name}-{key}.so"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as work:
            built = Path(work) / target.name
            command = [compiler, *flags, str(source), "-o", str(built)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            built.rename(target)
    return target


def _processor() -> str:
    """What -march=native depends on: a cache folder may be shared between machines."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return platform.processor()
    lines = info.read_text().splitlines()
    wanted = ("model name", "flags", "CPU part", "Features")
    return "\n".join(next((line for line in lines if line.startswith(name)), "") for name in wanted)
