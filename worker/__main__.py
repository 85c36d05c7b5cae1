"""`python -m worker`: one engine process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, get_args

import click
from click.core import ParameterSource

from worker.engine.compute_threads import wait_politely
from worker.runtime.config import config
from worker.runtime.errors import StartError
from worker.runtime.generate import generate
from worker.runtime.options import engine_options, show_variables
from worker.runtime.plan import plan
from worker.runtime.verify import verify
from worker.settings import (
    EngineKind,
    LogFormat,
    LogLevel,
    WorkerSettings,
    logical_cores,
    model_name_of,
    physical_cores,
    unique_name,
)

DATA = Path("~/.local/share/batten")


@click.group(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": False},
)
@click.option(
    "--model-name", envvar="BATTEN_MODEL_NAME", help="Name that clients use; default: the folder's."
)
@click.option("--redis", "redis_url", envvar="REDIS_URL", help="redis://host:port/0 of the queue.")
@click.option("--store", envvar="BATTEN_STORE", help="Object store: file:///dir or s3://bucket.")
@click.option(
    "--store-seconds",
    type=click.FloatRange(0, min_open=True),
    default=30.0,
    envvar="BATTEN_STORE_SECONDS",
    show_default=True,
    help="Longest request to the object store, and all retries of it.",
)
@click.option(
    "--cache-dir",
    type=click.Path(path_type=Path),
    envvar="BATTEN_CACHE_DIR",
    help="Adapters fetched from the store are kept here; default: in the data directory.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    default=DATA,
    envvar="BATTEN_DATA",
    help="Data directory: where the store and the cache lie unless named.",
)
@engine_options
@click.option(
    "--engine",
    type=click.Choice(get_args(EngineKind)),
    default="hf",
    envvar="BATTEN_ENGINE",
    show_default=True,
    help="null computes nothing: for load tests of everything around the model.",
)
@click.option(
    "--null-delay",
    type=click.FloatRange(0),
    default=0.0,
    envvar="BATTEN_NULL_DELAY",
    help="Seconds that a step of the null engine takes.",
)
@click.option(
    "--name",
    envvar="BATTEN_WORKER_NAME",
    help="Beginning of this worker's name; default: host-pid.",
)
@click.option(
    "--drain-seconds",
    type=click.FloatRange(0),
    default=30.0,
    envvar="BATTEN_DRAIN_SECONDS",
    show_default=True,
    help="Time to finish what runs after SIGTERM; the rest is given back.",
)
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    envvar="BATTEN_METRICS_PORT",
    help="Serve Prometheus metrics of this engine there; 0: on any free port.",
)
@click.option(
    "--metrics-host",
    default="127.0.0.1",
    envvar="BATTEN_METRICS_HOST",
    show_default=True,
    help="Address they are served at.",
)
@click.option(
    "--lease-seconds",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    envvar="BATTEN_LEASE_SECONDS",
    show_default=True,
    help="Work of a worker silent for so long goes to another; the same for every process.",
)
@click.option(
    "--log-level",
    type=click.Choice(get_args(LogLevel), case_sensitive=False),
    default="INFO",
    envvar="BATTEN_LOG_LEVEL",
    show_default=True,
    help="Least severe log lines to write.",
)
@click.option(
    "--log-format",
    type=click.Choice(get_args(LogFormat)),
    default="auto",
    envvar="BATTEN_LOG_FORMAT",
    show_default=True,
    help="Of log lines; auto: console on a terminal, else json.",
)
@click.pass_context
def main(ctx: click.Context, /, data: Path, name: str | None, **options: Any) -> None:
    """Run one engine: it takes work from the queue in Redis and answers into it."""
    wait_politely(options["threads"] or physical_cores(), logical_cores())
    if ctx.invoked_subcommand is not None:
        _refuse_options(ctx)
        return
    from worker.runtime.process import run

    try:
        status = run(worker_settings(data=data, name=name, **options))
    except StartError as error:
        click.echo(f"Error: {error}", err=True)
        status = 1
    sys.exit(status)


def _refuse_options(ctx: click.Context) -> None:
    """Options of the worker would be ignored by a subcommand. Raises click.UsageError."""
    for name in ctx.params:
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{option} must come after {ctx.invoked_subcommand}")


def worker_settings(
    *,
    data: Path,
    name: str | None,
    model: str | None,
    model_name: str | None,
    redis_url: str | None,
    store: str | None,
    cache_dir: Path | None,
    **rest: Any,
) -> WorkerSettings:
    """Fill in what was not given. Raises click.UsageError for what has no default."""
    data = data.expanduser().absolute()
    if not model:
        raise click.UsageError("no model: give --model or set BATTEN_MODEL to a folder or hub id")
    if not redis_url:
        raise click.UsageError("no queue: give --redis or set REDIS_URL (redis://host:port/0)")
    return WorkerSettings(
        model=model,
        model_name=model_name or model_name_of(model),
        redis_url=redis_url,
        store=store or f"file://{data / 'store'}",
        cache_dir=(cache_dir or data / "adapter-cache").expanduser(),
        worker=unique_name(name),
        **rest,
    )


for command in (config, generate, plan, verify):
    main.add_command(command)
for command in (main, *main.commands.values()):
    show_variables(command)


if __name__ == "__main__":
    main(prog_name="python -m worker")
