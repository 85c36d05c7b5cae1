"""Which processes `batten up` runs, and with what environment: pure data."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gateway.cli.supervisor.process import ChildSpec

API_STOP_SECONDS = 8.0
WORKER_STOP_SECONDS = 40.0
OTHER_STOP_SECONDS = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpPlan:
    """What one supervisor runs. `redis_argv` is None when an outside server is used."""

    host: str
    port: int
    data: Path
    database_url: str = field(repr=False)
    redis_url: str = field(repr=False)
    redis_argv: tuple[str, ...] | None
    store: str
    model: str | None
    model_name: str | None
    workers: int
    log_level: str
    admin_key: str | None = field(default=None, repr=False)


def redis_child(plan: UpPlan, environ: Mapping[str, str]) -> ChildSpec | None:
    if plan.redis_argv is None:
        return None
    return ChildSpec("redis", plan.redis_argv, environ, OTHER_STOP_SECONDS)


def service_children(plan: UpPlan, environ: Mapping[str, str]) -> list[ChildSpec]:
    """In the order in which they are started; they are stopped in this order too."""
    env = child_environment(plan, environ)
    gateway = (sys.executable, "-m", "gateway")
    return [
        ChildSpec("api", (*gateway, "api"), env, API_STOP_SECONDS),
        *worker_children(plan, env),
        ChildSpec("collector", (*gateway, "collector"), env, OTHER_STOP_SECONDS),
        ChildSpec("control", (*gateway, "control"), env, OTHER_STOP_SECONDS),
    ]


def worker_children(plan: UpPlan, env: Mapping[str, str]) -> list[ChildSpec]:
    devices = _visible_gpus(env)
    return [
        ChildSpec(
            f"worker-{number + 1}",
            (sys.executable, "-m", "worker"),
            {
                **env,
                **_share_of_machine(number, plan.workers, devices, env),
                **_metrics_port(number, env),
                "BATTEN_WORKER_NAME": label,
            },
            WORKER_STOP_SECONDS,
        )
        for number, label in enumerate(worker_labels(plan))
    ]


def worker_labels(plan: UpPlan) -> list[str]:
    """Each worker's name begins with its label, which no other supervisor uses."""
    owner = f"{socket.gethostname()}-{os.getpid()}"
    return [f"{owner}-{number + 1}" for number in range(plan.workers)]


def child_environment(plan: UpPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """Secrets travel by environment, never on a command line that `ps` shows."""
    given = {
        "BATTEN_HOST": plan.host,
        "BATTEN_PORT": str(plan.port),
        "BATTEN_DATA": str(plan.data),
        "BATTEN_STORE": plan.store,
        "BATTEN_LOG_LEVEL": plan.log_level,
        "BATTEN_MODEL": plan.model,
        "BATTEN_MODEL_NAME": plan.model_name,
        "BATTEN_ADMIN_KEY": plan.admin_key,
        "DATABASE_URL": plan.database_url,
        "REDIS_URL": plan.redis_url,
        "PYTHONUNBUFFERED": "1",
    }
    return {**environ, **{name: value for name, value in given.items() if value is not None}}


def _share_of_machine(
    number: int, workers: int, devices: int, env: Mapping[str, str]
) -> dict[str, str]:
    """One GPU each, or an equal part of the cores, unless the operator has said otherwise."""
    if devices:
        if "CUDA_VISIBLE_DEVICES" in env:
            return {}
        return {"CUDA_VISIBLE_DEVICES": str(number % devices)}
    if workers > 1 and "BATTEN_THREADS" not in env:
        return {"BATTEN_THREADS": str(max(1, (os.cpu_count() or 1) // workers))}
    return {}


def _metrics_port(number: int, env: Mapping[str, str]) -> dict[str, str]:
    """Workers serve metrics on ports that follow the one given."""
    port = env.get("BATTEN_METRICS_PORT", "")
    return (
        {"BATTEN_METRICS_PORT": str(int(port) + number)} if port.isdecimal() and port != "0" else {}
    )


def _visible_gpus(env: Mapping[str, str]) -> int:
    if "CUDA_VISIBLE_DEVICES" in env:
        return len([name for name in env["CUDA_VISIBLE_DEVICES"].split(",") if name.strip()])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))
