"""How much of a device's memory is free, and how much something takes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

from worker.engine.live_bytes import LiveBytes
from worker.engine.sizing import DEVICE_SHARE

_STATUS = Path("/proc/self/status")


def free_memory(device: torch.device) -> int:
    """Bytes free now: of the share of a GPU that this process may use, or on this machine within
    its control group's limit.

    There, files that this process has mapped (libraries, and weights in the type in which they are
    served) are in use, though the kernel would give them up.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - (1 - DEVICE_SHARE) * total))
    mapped = _kibibytes(_STATUS, "RssFile") or 0
    return max(0, min(_machine_free(), _group_free()) - mapped)


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
    found = _kibibytes(_STATUS, name)
    if found is None:
        raise OSError(f"{_STATUS} tells no {name}")
    return found


def _machine_free() -> int:
    found = _kibibytes(Path("/proc/meminfo"), "MemAvailable")
    return 4 * 2**30 if found is None else found


def _group_free(group: Path = Path("/sys/fs/cgroup")) -> int:
    """What a container may still use (cgroup v2), or more than any machine has. Like MemAvailable
    it counts cached files as free."""
    limit = "".join(_lines(group / "memory.max")).strip()
    used = "".join(_lines(group / "memory.current")).strip()
    if not limit.isdigit() or not used.isdigit():
        return 1 << 60
    stat = dict(line.split() for line in _lines(group / "memory.stat"))
    cached = int(stat.get("active_file", 0)) + int(stat.get("inactive_file", 0))
    return max(0, int(limit) - int(used) + cached)


def _kibibytes(path: Path, name: str) -> int | None:
    """Bytes of a line such as `VmRSS:  1024 kB`; None where there is none."""
    found = (line for line in _lines(path) if line.startswith(f"{name}:"))
    return next((int(line.split()[1]) * 1024 for line in found), None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
