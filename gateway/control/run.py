"""The control process: a Celery worker, with beat in one process per data directory."""

from __future__ import annotations

import os

import structlog
from celery import signals

from gateway.control.app import control_app
from gateway.control.lineage import die_with_parent
from gateway.control.runtime import Runtime
from gateway.kit.locks import exclusive
from gateway.settings import Settings

CONCURRENCY = 4
"""Two at most deliver webhooks (`gateway.webhooks.delivery`): as many are left for the rest."""

_log = structlog.get_logger(__name__)


def run_control(settings: Settings) -> None:
    """In the foreground, until SIGTERM (warm) or SIGQUIT (cold)."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    settings.data.mkdir(parents=True, exist_ok=True)
    runtime = Runtime(settings)
    app = control_app(settings, runtime)
    signals.worker_process_init.connect(die_with_parent, weak=False)
    signals.beat_embedded_init.connect(die_with_parent, weak=False)
    signals.worker_shutting_down.connect(runtime.stop, weak=False)
    signals.worker_process_shutdown.connect(runtime.close, weak=False)
    # Beat is a singleton: another control process of this directory may have it.
    with exclusive(settings.data / "beat.lock") as beats:
        worker = app.Worker(
            hostname=f"control-{os.getpid()}@%h",
            beat=beats,
            schedule_filename=str(settings.data / "beat-schedule"),
            concurrency=CONCURRENCY,
            pool="prefork",
            loglevel="WARNING",
            without_gossip=True,
            without_mingle=True,
            quiet=True,
        )
        _log.info("control_starts", beat=beats)
        worker.start()
