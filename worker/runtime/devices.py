"""Peak figures of devices, for rooflines: the makers' data sheets, dense 16-bit matrix products."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from worker.engine.sizing import Roofline

MEASURE_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class Device:
    memory: int
    roofline: Roofline


def _device(gigabytes: int, teraflops: float, terabytes: float) -> Device:
    return Device(gigabytes * 10**9, Roofline(teraflops * 1e12, terabytes * 1e12))


DEVICES = {
    "l4": _device(24, 121, 0.3),
    "l40s": _device(48, 362, 0.864),
    "a100": _device(80, 312, 2.039),
    "h100": _device(80, 989, 3.35),
    "h200": _device(141, 989, 4.8),
    "mi300x": _device(192, 1307, 5.3),
}


def measure_cpu(dtype: torch.dtype) -> Roofline:
    """What this machine reaches now, in about a second."""
    square = torch.randn(1024, 1024).to(dtype)
    products = _rate(lambda: square @ square)
    data = torch.zeros(1 << 26, dtype=torch.float32)
    sums = _rate(data.sum)
    return Roofline(products * 2 * 1024**3, sums * data.nbytes)


def _rate(action: Callable[[], object]) -> float:
    """The best of several calls, in calls a second."""
    action()
    best, end = float("inf"), time.perf_counter() + MEASURE_SECONDS
    while (begin := time.perf_counter()) < end:
        action()
        best = min(best, time.perf_counter() - begin)
    return 1 / best
