"""`python -m worker config`: what a worker of this environment would run with."""

from __future__ import annotations

import json
from collections.abc import Iterator

import click

from worker.protocol.urls import masked

Row = tuple[str, str, str]


@click.command
@click.option("--json", "as_json", is_flag=True, help="A list of [variable, value, meaning].")
@click.pass_context
def config(ctx: click.Context, as_json: bool) -> None:
    """Show a worker's settings as the environment gives them, secrets masked."""
    rows = list(_rows(ctx.find_root()))
    if as_json:
        click.echo(json.dumps(rows))
        return
    for name, value, _ in rows:
        click.echo(f"{name}={value}")


def _rows(worker: click.Context) -> Iterator[Row]:
    """Variable, value and meaning of each option of the worker."""
    for option in worker.command.params:
        if isinstance(option, click.Option) and isinstance(option.envvar, str):
            yield option.envvar, _shown(worker.params.get(str(option.name))), option.help or ""


def _shown(value: object) -> str:
    return "" if value is None else masked(str(value))
