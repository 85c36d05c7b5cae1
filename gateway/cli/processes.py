"""One process each: api, collector, control, worker."""

from __future__ import annotations

import asyncio
import os
import sys

import click

from gateway.cli.configuration import load_settings


@click.command
@click.option("--host", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on.")
def api(host: str | None, port: int | None) -> None:
    """Run the HTTP API (FastAPI on uvicorn)."""
    import uvicorn

    from gateway.app import create_app
    from gateway.cli.ports import listen

    settings = load_settings(host=host, port=port)
    listener = listen(settings.host, settings.port)
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(settings),
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
    from gateway.collector.run import run_collector

    asyncio.run(run_collector(load_settings()))


@click.command
def control() -> None:
    """Run the control tasks: a Celery worker with its own beat."""
    from gateway.control.run import run_control

    run_control(load_settings())


@click.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def worker(arguments: tuple[str, ...]) -> None:
    """Run an engine. All arguments go to `python -m worker`."""
    os.execv(sys.executable, [sys.executable, "-m", "worker", *arguments])
