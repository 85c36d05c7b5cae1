from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

Command = Callable[..., Any]


def _server_options(command: Command) -> Command:
    options = (
        click.option(
            "--url",
            envvar="BATTEN_URL",
            default="http://127.0.0.1:8400",
            show_default=True,
            help="The server (BATTEN_URL).",
        ),
        click.option(
            "--key",
            envvar="BATTEN_API_KEY",
            required=True,
            show_envvar=True,
            help="API key of a tenant.",
        ),
        click.option(
            "-o",
            "--output",
            type=click.Path(dir_okay=False, path_type=Path),
            callback=_in_a_folder,
            help="Where the output goes; default: beside the input, as NAME.out.jsonl.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _in_a_folder(
    _context: click.Context, _option: click.Parameter, output: Path | None
) -> Path | None:
    """Asked before anything is sent: no batch is to run for an output that has no place."""
    if output is not None and not output.parent.is_dir():
        raise click.BadParameter(f"there is no folder {output.parent}")
    return output


@click.group
def batch() -> None:
    """Batches, as a client of a running server."""


@batch.command
@click.argument("input", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--window", default="24h", show_default=True, help="Completion window.")
@_server_options
def run(input: Path, window: str, url: str, key: str, output: Path | None) -> None:
    """Upload INPUT.jsonl, run it as a batch, show progress, download the results."""
    from gateway.cli.batch_run import follow, submit
    from gateway.cli.client import Client

    client = Client(url, key)
    batch_id = submit(client, input, window)
    click.echo(f"{batch_id} is submitted; `batten batch wait {batch_id}` resumes.", err=True)
    follow(client, batch_id, output or input.with_suffix(".out.jsonl"))


@batch.command
@click.argument("batch_id")
@_server_options
def wait(batch_id: str, url: str, key: str, output: Path | None) -> None:
    """Wait for a batch that was submitted before, then download its results."""
    from gateway.cli.batch_run import follow
    from gateway.cli.client import Client

    follow(Client(url, key), batch_id, output or Path(f"{batch_id}.out.jsonl"))
