"""`python -m worker`: one engine process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from worker.runtime.errors import StartError
from worker.settings import WorkerSettings, model_name_of, parse_bytes, unique_name

DATA = Path("~/.local/share/batten")


Decorator = Callable[[Callable[..., None]], Callable[..., None]]


class Bytes(click.ParamType[int]):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_bytes(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _positive(default: int | None, name: str, help: str) -> Decorator:
    return click.option(
        f"--{name}",
        type=click.IntRange(1),
        default=default,
        envvar=f"BATTEN_{name.replace('-', '_').upper()}",
        show_default=default is not None,
        help=help,
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": False})
@click.option("--model", envvar="BATTEN_MODEL", help="Base model: a local folder or a hub id.")
@click.option(
    "--model-name", envvar="BATTEN_MODEL_NAME", help="Name that clients use; default: the folder's."
)
@click.option("--redis", "redis_url", envvar="REDIS_URL", help="redis://host:port/0 of the queue.")
@click.option("--store", envvar="BATTEN_STORE", help="Object store: file:///dir or s3://bucket.")
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
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    default="auto",
    envvar="BATTEN_DTYPE",
    show_default=True,
    help="Type of the weights; auto: bfloat16 where the device computes in it.",
)
@click.option(
    "--kv-memory",
    type=Bytes(),
    envvar="BATTEN_KV_MEMORY",
    help="Memory for keys and values, such as 2GiB; default: what the device has left.",
)
@_positive(256, "max-sequences", "Most sequences running at once.")
@_positive(2048, "token-budget", "Most tokens computed in one step.")
@_positive(256, "adapter-rank", "Sum of the ranks of the adapters on the device.")
@_positive(None, "context-tokens", "Longest context; default: the model's.")
@_positive(None, "threads", "Compute threads; default: the physical cores.")
@click.option(
    "--engine",
    type=click.Choice(["hf", "null"]),
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
@click.option("--log-level", default="INFO", envvar="BATTEN_LOG_LEVEL", show_default=True)
@click.option(
    "--log-format",
    type=click.Choice(["auto", "json", "console"]),
    default="auto",
    envvar="BATTEN_LOG_FORMAT",
    show_default=True,
)
def main(data: Path, name: str | None, **options: Any) -> None:
    """Run one engine: it takes work from the queue in Redis and answers into it."""
    from worker.runtime.process import run

    try:
        status = run(worker_settings(data=data, name=name, **options))
    except StartError as error:
        click.echo(f"Error: {error}", err=True)
        status = 1
    sys.exit(status)


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


if __name__ == "__main__":
    main(prog_name="python -m worker")
