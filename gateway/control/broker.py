"""Celery on the deployment's Redis: one configuration for senders and workers.

The keys of Celery carry a prefix of their own, so that it shares a server with the queue. The
visibility timeout is set in every place that some version reads
(https://github.com/celery/celery/issues/9339); the shortest one on a broker wins.
"""

from __future__ import annotations

import asyncio
import time
from urllib.parse import parse_qs, urlsplit, urlunsplit

import structlog
from celery import Celery
from kombu.exceptions import OperationalError

from gateway.kit.tasks import Tasks
from gateway.settings import Settings

VISIBILITY_SECONDS = 3600
_SEND_SECONDS = 1.0
_QUIET_SECONDS = 5.0

_log = structlog.get_logger(__name__)


def broker_url(redis_url: str) -> str:
    """Kombu's spelling of a URL for redis-py: only that of Unix sockets differs."""
    parts = urlsplit(redis_url)
    if parts.scheme != "unix":
        return redis_url
    database = parse_qs(parts.query).get("db", ["0"])[0]
    query = f"virtual_host={database}"
    return urlunsplit(("redis+socket", parts.netloc, parts.path, query, ""))


def make_celery(settings: Settings) -> Celery:
    if settings.redis_url is None:
        raise ValueError("REDIS_URL is not set")
    broker = broker_url(settings.redis_url.get_secret_value())
    app = Celery("batten", broker=broker, set_as_current=False)
    transport = {
        "global_keyprefix": "batten:celery:",
        "visibility_timeout": VISIBILITY_SECONDS,
        "socket_connect_timeout": _SEND_SECONDS,
        "health_check_interval": 25,
    }
    app.conf.update(
        task_ignore_result=True,
        task_store_errors_even_if_ignored=False,
        task_acks_late=True,
        task_reject_on_worker_lost=False,
        task_default_queue="control",
        task_create_missing_queues=False,
        task_publish_retry=False,
        task_serializer="json",
        accept_content=["json"],
        task_time_limit=300,
        worker_prefetch_multiplier=1,
        worker_cancel_long_running_tasks_on_connection_loss=True,
        worker_enable_prefetch_count_reduction=True,
        worker_hijack_root_logger=False,
        worker_send_task_events=False,
        broker_transport_options=transport,
        result_backend_transport_options={"visibility_timeout": VISIBILITY_SECONDS},
        visibility_timeout=VISIBILITY_SECONDS,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        timezone="UTC",
        enable_utc=True,
    )
    return app


class CeleryTasks:
    """A Tasks port. Redis that does not answer costs a sender a second, then nothing for a
    while: the sweeps find the work."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._quiet_until = 0.0

    async def send(self, name: str, *args: str) -> None:
        if time.monotonic() < self._quiet_until:
            return
        try:
            async with asyncio.timeout(2 * _SEND_SECONDS):
                await asyncio.to_thread(self._app.send_task, name, args, ignore_result=True)
        except (OperationalError, OSError, TimeoutError) as error:
            self._quiet_until = time.monotonic() + _QUIET_SECONDS
            _log.warning("task_not_sent", task=name, error=str(error))


def celery_tasks(settings: Settings) -> Tasks:
    return CeleryTasks(make_celery(settings))
