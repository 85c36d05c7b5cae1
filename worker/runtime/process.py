"""One worker process: checks, engine, Redis, signals, exit status."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from functools import partial

import structlog
from redis.asyncio import Redis

from worker.engine.compute_threads import in_passing
from worker.engine.engine import Engine
from worker.engine.metrics import EngineStats
from worker.queue.base import QueueUnavailable
from worker.queue.redis import RedisQueue, RedisSharedPrefixes, RedisWorkerDirectory, connect
from worker.queue.settings import QueueSettings
from worker.runtime.backoff import Backoff
from worker.runtime.build import build_engine
from worker.runtime.errors import QueueUnreachable
from worker.runtime.lifecycle import StopSwitch, serve
from worker.runtime.logs import configure_logs
from worker.runtime.loops import Rhythm
from worker.runtime.metrics import serve_metrics
from worker.runtime.own_kernels import check_own_kernels
from worker.runtime.worker import Worker
from worker.settings import WorkerSettings

_log = structlog.get_logger(__name__)

REACH_SECONDS = 5.0
CRASHED = 3


def run(settings: WorkerSettings) -> int:
    """Exit status: 0 after a drain, 3 after an engine crash. Raises StartError."""
    configure_logs(settings.log_level, settings.log_format)
    check_own_kernels()
    asyncio.run(_reach_queue(settings))
    engine = in_passing(partial(build_engine, settings))  # whose own thread then computes
    return asyncio.run(_run(settings, engine))


async def _run(settings: WorkerSettings, engine: Engine) -> int:
    client = connect(settings.redis_url)
    queue_settings = QueueSettings.with_lease(settings.lease_seconds)
    queue = RedisQueue(client, settings.model_name, queue_settings)
    worker = Worker(settings.worker, engine, queue)
    close_metrics = _serve_metrics(settings, worker)
    stop = StopSwitch()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.press)
    _log.info("worker_ready", worker=worker.name, model=queue.model, limits=str(worker.limits))
    try:
        served = await serve(
            worker,
            RedisWorkerDirectory(client, queue_settings),
            RedisSharedPrefixes(client, settings.model_name),
            stop,
            rhythm=Rhythm(lease=queue_settings.lease_seconds),
            drain_seconds=settings.drain_seconds,
        )
    finally:
        close_metrics()
        await _close(queue, client)
        _end_at_once_if_busy(worker)
    return 0 if served else CRASHED


def _serve_metrics(settings: WorkerSettings, worker: Worker) -> Callable[[], None]:
    if settings.metrics_port is None:
        return lambda: None

    def stats() -> EngineStats:
        return worker.thread.published.stats

    host = settings.metrics_host
    port, stop = serve_metrics(host, settings.metrics_port, settings.model_name, stats)
    _log.info("metrics_served", url=f"http://{host}:{port}/metrics")
    return stop


async def _reach_queue(settings: WorkerSettings) -> None:
    """Ask for the epoch until Redis answers. Raises QueueUnreachable."""
    client = connect(settings.redis_url)
    queue = RedisQueue(client, settings.model_name)
    backoff = Backoff(most=1.0)
    deadline = asyncio.get_running_loop().time() + REACH_SECONDS
    try:
        while True:
            try:
                await queue.epoch()
                return
            except QueueUnavailable as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise QueueUnreachable(f"{error} (REDIS_URL or --redis)") from error
            await asyncio.sleep(backoff.next())
    finally:
        await client.aclose()


async def _close(queue: RedisQueue, client: Redis) -> None:
    await queue.close()
    await client.aclose()


def _end_at_once_if_busy(worker: Worker) -> None:
    """A thread inside a long step cannot be stopped, and must not outlive the interpreter."""
    if worker.thread.step_seconds:
        sys.stderr.flush()
        os._exit(CRASHED if worker.crashed.is_set() else 0)
