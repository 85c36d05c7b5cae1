"""One process each: api, collector, control, worker."""

from __future__ import annotations

import asyncio
import os
import sys

import click

from gateway.cli.configuration import load_settings
from gateway.cli.errors import CommandError
from gateway.settings import Settings


def start_process(settings: Settings) -> None:
    """What every server process begins with. Raises CommandError."""
    from gateway.cli.database import check_deployed
    from gateway.kit.logging import configure_logging

    if settings.redis_url is None:
        raise CommandError(
            "REDIS_URL is not set: this process needs a Redis such as redis://127.0.0.1:6379/0; "
            "`batten up` runs everything with one of its own"
        )
    check_deployed(settings)
    configure_logging(settings.log_level)


@click.command
@click.option("--host", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on.")
def api(host: str | None, port: int | None) -> None:
    """Run the HTTP API (FastAPI on uvicorn)."""
    settings = load_settings(host=host, port=port)
    start_process(settings)
    import uvicorn

    from gateway.app import create_app
    from gateway.cli.graceful_server import GracefulServer
    from gateway.cli.ports import listen
    from gateway.control.broker import celery_tasks

    listener = listen(settings.host, settings.port)
    server = GracefulServer(
        uvicorn.Config(
            create_app(settings, celery_tasks(settings)),
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=5,
        )
    )
    with listener:
        asyncio.run(server.serve(sockets=[listener]))
    if not server.started:
        raise click.exceptions.Exit(1)


@click.command
def collector() -> None:
    """Run the collector (events into SQL) and the dispatcher (SQL into Redis)."""
    settings = load_settings()
    start_process(settings)
    from gateway.collector.run import run_collector

    asyncio.run(run_collector(settings))


@click.command
@click.option("--check", is_flag=True, help="Say whether tasks are consumed, and end: 0 if so.")
def control(check: bool) -> None:
    """Run the control tasks: a Celery worker with its own beat."""
    settings = load_settings()
    if check:
        _check_control(settings)
        return
    start_process(settings)
    from gateway.control.run import run_control

    run_control(settings)


def _check_control(settings: Settings) -> None:
    """Raises CommandError."""
    from gateway.cli.database import check_deployed
    from gateway.control.liveness import MOST_SECONDS, silent_seconds

    check_deployed(settings)
    silent = asyncio.run(silent_seconds(settings))
    if silent is None:
        raise CommandError("no control task was ever consumed: is `batten control` running?")
    if silent > MOST_SECONDS:
        raise CommandError(f"no control task was consumed for {silent:.0f} s")
    click.echo(f"a control task was consumed {max(0.0, silent):.0f} s ago")


@click.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def worker(arguments: tuple[str, ...]) -> None:
    """Run an engine. All arguments go to `python -m worker`."""
    os.execv(sys.executable, [sys.executable, "-m", "worker", *arguments])
