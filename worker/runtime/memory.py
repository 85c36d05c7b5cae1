"""How much of a device's memory keys and values may have."""

from __future__ import annotations

from pathlib import Path

import torch

CPU_SHARE = 0.125
CPU_MOST = 4 * 2**30
GPU_SHARE = 0.85  # the rest is for activations, which grow with the token budget


def free_memory(device: torch.device) -> int:
    """Bytes free now: on the device, or on this machine within its control group's limit."""
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return int(free)
    return min(_machine_free(), _group_free())


def kv_memory(free: int, device_type: str) -> int:
    """A CPU's memory belongs to others too, so that only a part is taken, and a bounded one."""
    if device_type == "cuda":
        return int(free * GPU_SHARE)
    return min(int(free * CPU_SHARE), CPU_MOST)


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
