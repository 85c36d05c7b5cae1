"""The Celery application of the control processes: its tasks and its beat.

Every task is short or resumable, idempotent by compare-and-set in SQL, and reached by a sweep:
a lost message costs time, never work.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta

from celery import Celery

from gateway import heartbeats
from gateway.adapters.ingest import ingest, waiting_revisions
from gateway.adapters.purge import purge_contents, remove_orphan_uploads
from gateway.auth.idempotency import forget_old_keys
from gateway.batches.finaliser import finalize_batch
from gateway.batches.sweep import sweep_batches
from gateway.batches.validation import validate_batch
from gateway.billing.invoices import close_invoices
from gateway.billing.storage import meter_storage
from gateway.control.broker import CeleryTasks, make_celery
from gateway.control.runtime import Runtime
from gateway.files.purge import purge_files, remove_orphans
from gateway.jobs.service import expire_jobs
from gateway.jobs.withdrawal import withdraw
from gateway.kit import task_names as names
from gateway.kit.context import Context
from gateway.kit.tasks import Tasks
from gateway.settings import Settings
from gateway.webhooks.delivery import deliver
from gateway.webhooks.upkeep import keep_webhooks

CONTROL = "control"

_SECONDS = {
    names.DELIVER: 2,
    names.SWEEP_BATCHES: 5,
    names.SWEEP_JOBS: 5,
    names.HEARTBEAT: 5,
    names.SWEEP_ADAPTERS: 15,
    names.SWEEP_WITHDRAWN: 15,
    names.SWEEP_FILES: 300,
    names.BILLING: 300,
    names.SWEEP_WEBHOOKS: 300,
    names.SWEEP_KEYS: 3600,
}


def control_app(settings: Settings, runtime: Runtime) -> Celery:
    app = make_celery(settings)
    app.conf.beat_schedule = {
        name: {"task": name, "schedule": float(seconds), "options": {"expires": seconds}}
        for name, seconds in _SECONDS.items()
    }
    tasks = CeleryTasks(app)
    for name, work in works(tasks, runtime.is_stopping).items():
        _register(app, runtime, name, work)
    return app


def works(
    tasks: Tasks, is_stopping: Callable[[], bool] = lambda: False
) -> Mapping[str, Callable[..., Awaitable[object]]]:
    """What each task does, given a context and the message's arguments."""
    return {
        names.VALIDATE: lambda context, batch_id: validate_batch(context, tasks, batch_id),
        names.FINALIZE: finalize_batch,
        names.INGEST: ingest,
        names.WITHDRAW: withdraw,
        names.DELIVER: lambda context: deliver(context, is_stopping),
        names.SWEEP_BATCHES: lambda context: sweep_batches(context, tasks),
        names.SWEEP_ADAPTERS: lambda context: send_ingests(context, tasks),
        names.SWEEP_JOBS: expire_jobs,
        names.SWEEP_WITHDRAWN: withdraw,
        names.SWEEP_FILES: clean_store,
        names.SWEEP_WEBHOOKS: keep_webhooks,
        names.SWEEP_KEYS: clean_keys,
        names.BILLING: bill,
        names.HEARTBEAT: beat,
    }


def _register(
    app: Celery, runtime: Runtime, name: str, work: Callable[..., Awaitable[object]]
) -> None:
    def task(*args: str) -> None:
        runtime.run(name, lambda context: work(context, *args))

    app.task(task, name=name, shared=False, lazy=False)


async def send_ingests(context: Context, tasks: Tasks) -> None:
    for revision_id in await waiting_revisions(context):
        await tasks.send(names.INGEST, revision_id)


async def clean_store(context: Context) -> None:
    await purge_files(context)
    await remove_orphans(context)
    await remove_orphan_uploads(context)
    await purge_contents(context, timedelta(hours=context.settings.deleted_adapter_hours))


async def bill(context: Context) -> None:
    await meter_storage(context)
    await close_invoices(context)


async def clean_keys(context: Context) -> None:
    async with context.database.write() as session:
        await forget_old_keys(session, context.settings.idempotency_hours)


async def beat(context: Context) -> None:
    """Says that tasks are consumed, which answering a ping does not."""
    async with context.database.write() as session:
        await heartbeats.touch(session, CONTROL)
