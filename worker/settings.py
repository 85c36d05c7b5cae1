"""Settings of a worker process: read once at start, frozen, passed down."""

from __future__ import annotations

import os
import re
import secrets
import socket
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

DType = Literal["auto", "float32", "bfloat16"]
EngineKind = Literal["hf", "null"]
LogFormat = Literal["auto", "json", "console"]
LogLevel = Literal["DEBUG", "INFO", "WARN", "WARNING", "ERROR", "CRITICAL"]

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """`model` is a local folder or a hub id. `kv_memory` (bytes) is None to measure the device,
    `context_tokens` None for the model's own. Small blocks of `block_size` tokens waste less,
    large ones are read faster. `token_budget` None is the device's: a step should keep the device
    busy, and take far less time than a lease lasts. Adapters on the device have
    `adapter_rank` rows together, and `adapter_memory` bytes for all else that they change.
    Requests wait `store_patience` seconds for theirs while the object store is away.
    `threads` None means every physical core. `pinned_share` of the KV memory may be kept for
    system prompts that tenants share. `deterministic`: no request's numbers depend, to the last
    bit, on what else a step computes. `pack_weights` keeps a second copy of a CPU's weights in the
    order that its products read them; None: where that takes at most a quarter of the free memory.
    """

    model: str
    dtype: DType = "auto"
    kv_memory: int | None = None
    max_sequences: int = 256
    token_budget: int | None = None
    adapter_rank: int = 256
    adapter_memory: int = 1 << 30
    store_patience: float = 300.0
    context_tokens: int | None = None
    block_size: int = 16
    threads: int | None = None
    deterministic: bool = False
    pinned_share: float = 0.1
    pack_weights: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings(EngineSettings):
    """`model_name` is what clients call the model, and the name of the queue. `store` holds the
    adapters; a request to it takes at most `store_seconds`, retries included. `null_delay`
    (seconds) is what a step of the null engine takes. On a first SIGTERM the worker takes nothing
    new and has `drain_seconds` to finish what runs; the rest is given back to the queue. What a
    worker held that is silent for `lease_seconds` goes to another: the same value for every process
    of a deployment. Without a `metrics_port` no metrics are served.
    """

    model_name: str
    redis_url: str = field(repr=False)
    store: str
    store_seconds: float = 30.0
    cache_dir: Path
    worker: str
    engine: EngineKind = "hf"
    drain_seconds: float = 30.0
    lease_seconds: float = 60.0
    null_delay: float = 0.0
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    log_level: LogLevel = "INFO"
    log_format: LogFormat = "auto"


def unique_name(label: str | None) -> str:
    """A name no earlier process had: leases and isolation are kept by worker name."""
    return f"{label or f'{socket.gethostname()}-{os.getpid()}'}-{secrets.token_hex(3)}"


def model_name_of(model: str) -> str:
    """`/models/smollm2/` → `smollm2`; a hub id as it is. The gateway names models alike."""
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() else model


def parse_bytes(text: str) -> int:
    """`2GiB`, `512M`, `1.5gb` or plain bytes, in powers of 1024. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 512MiB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def physical_cores() -> int:
    """Cores this process may use, hyper-threads counted once where the kernel tells."""
    return max(1, min(len({_siblings(cpu) for cpu in _allowed()}), group_cores()))


def logical_cores() -> int:
    """The same, every hyper-thread counted."""
    return max(1, min(len(_allowed()), group_cores()))


def group_cores(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that a container's quota of CPU time (cgroup v2) comes to, whole ones; without a
    quota more than any machine has."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
    except OSError:
        return sys.maxsize
    return sys.maxsize if quota == "max" else max(1, int(quota) // int(period))


def _allowed() -> Collection[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _siblings(cpu: int) -> str:
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return path.read_text().strip()
    except OSError:
        return str(cpu)
