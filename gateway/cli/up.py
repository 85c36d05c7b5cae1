from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console


@click.command
@click.option("--model", metavar="PATH_OR_HUB_ID", help="Base model (BATTEN_MODEL).")
@click.option("--model-name", help="Name that clients use; default: the folder's name.")
@click.option("--host", help="Address to listen on; default 127.0.0.1.")
@click.option("--port", type=click.IntRange(0, 65535), help="Port; default 8400, 0: any free.")
@click.option("--data", type=click.Path(file_okay=False, path_type=Path), help="Data directory.")
@click.option(
    "--workers",
    type=click.IntRange(0, 64),
    default=1,
    envvar="BATTEN_WORKERS",
    show_default=True,
    help="Engine processes.",
)
@click.option("--follow", is_flag=True, help="Show every line that the processes log.")
def up(
    model: str | None,
    model_name: str | None,
    host: str | None,
    port: int | None,
    data: Path | None,
    workers: int,
    follow: bool,
) -> None:
    """Run everything on this machine, under one supervisor.

    Without REDIS_URL it runs a Redis server of its own, without DATABASE_URL it keeps its tables
    in SQLite; both lie in the data directory. Ctrl-C stops it all.
    """
    from gateway.cli.configuration import load_settings
    from gateway.cli.ports import free_port
    from gateway.cli.supervisor.run import run_up

    if model is not None and Path(model).expanduser().is_dir():
        model = str(Path(model).expanduser().resolve())
    settings = load_settings(model=model, model_name=model_name, host=host, port=port, data=data)
    if settings.port == 0:
        settings = settings.model_copy(update={"port": free_port(settings.host)})
    if settings.model is None and workers:
        raise click.UsageError("no model: give --model or set BATTEN_MODEL (or use --workers 0)")
    run_up(settings, workers=workers, follow=follow, console=Console(stderr=True))
