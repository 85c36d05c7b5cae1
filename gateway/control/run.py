"""The control process: a Celery worker, with beat in one process per data directory."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

import structlog
from celery import signals

from gateway.control.app import control_app
from gateway.control.lineage import die_with_parent
from gateway.control.runtime import Runtime
from gateway.settings import Settings

CONCURRENCY = 2

_log = structlog.get_logger(__name__)


def run_control(settings: Settings) -> None:
    """In the foreground, until SIGTERM (warm) or SIGQUIT (cold)."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    settings.data.mkdir(parents=True, exist_ok=True)
    runtime = Runtime(settings)
    app = control_app(settings, runtime)
    signals.worker_process_init.connect(die_with_parent, weak=False)
    signals.beat_embedded_init.connect(die_with_parent, weak=False)
    signals.worker_process_shutdown.connect(runtime.close, weak=False)
    lock = _beat_lock(settings.data / "beat.lock")
    try:
        worker = app.Worker(
            hostname=f"control-{os.getpid()}@%h",
            beat=lock is not None,
            schedule_filename=str(settings.data / "beat-schedule"),
            concurrency=CONCURRENCY,
            pool="prefork",
            loglevel="WARNING",
            without_gossip=True,
            without_mingle=True,
            quiet=True,
        )
        _log.info("control_starts", beat=lock is not None)
        worker.start()
    finally:
        if lock is not None:
            lock.close()


def _beat_lock(path: Path) -> IO[str] | None:
    """Beat is a singleton: None when another control process of this directory has it."""
    lock = path.open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return None
    return lock
