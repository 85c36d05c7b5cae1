"""How much of a device's memory keys and values may have."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

from worker.engine.live_bytes import LiveBytes
from worker.engine.sizing import DEVICE_SHARE

CPU_SHARE = 0.125
CPU_MOST = 4 * 2**30


def free_memory(device: torch.device) -> int:
    """Bytes free now: of the share of a GPU that this process may use, or on this machine within
    its control group's limit."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - (1 - DEVICE_SHARE) * total))
    return min(_machine_free(), _group_free())


def kv_memory(free: int, activations: int, device_type: str) -> int:
    """A CPU's memory belongs to others too, so that only a part is taken, and a bounded one."""
    rest = max(0, free - activations)
    return rest if device_type == "cuda" else min(int(rest * CPU_SHARE), CPU_MOST)


def peak_memory(device: torch.device, action: Callable[[], None]) -> int:
    """Bytes that `action` needs at once, beyond what is in use before and given back after.

    On a CPU that is the growth of the resident set's high-water mark: of all allocators, and of
    what operators use inside. Where the kernel has no such mark, the tensors alive are counted.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        action()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    _give_back_freed_memory()
    if not _reset_high_water_mark():
        with LiveBytes() as live:
            action()
        return int(live.peak)
    before = _status("VmRSS")
    action()
    peak = _status("VmHWM") - before
    _give_back_freed_memory()
    return max(0, peak)


def _give_back_freed_memory() -> None:
    """Heap that was freed but not returned would hide what is taken from it again."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _reset_high_water_mark() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status(name: str) -> int:
    """Bytes of one line of /proc/self/status."""
    for line in _lines(Path("/proc/self/status")):
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status tells no {name}")


def _machine_free() -> int:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 4 * 2**30


def _group_free(group: Path = Path("/sys/fs/cgroup")) -> int:
    """What a container may still use (cgroup v2), or more than any machine has."""
    limit = "".join(_lines(group / "memory.max")).strip()
    used = "".join(_lines(group / "memory.current")).strip()
    if not limit.isdigit() or not used.isdigit():
        return 1 << 60
    return max(0, int(limit) - int(used))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
