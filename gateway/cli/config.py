from __future__ import annotations

import json
import subprocess
import sys

import click
from pydantic import SecretStr
from rich.table import Column, Table

from gateway.cli.configuration import load_settings, variable
from gateway.cli.errors import CommandError
from gateway.cli.tables import show
from gateway.settings import Settings
from worker.protocol.urls import masked

Row = tuple[str, str, str]


@click.command
@click.option("--env", is_flag=True, help="Print NAME=value lines, secrets masked.")
def config(env: bool) -> None:
    """Show the effective settings, secrets masked: of gateway processes, then of workers alone."""
    settings = load_settings()
    rows = [
        (variable(name), _shown(name, settings), field.description or "")
        for name, field in Settings.model_fields.items()
    ]
    known = {name for name, _, _ in rows}
    rows += [row for row in _worker_rows() if row[0] not in known]
    if env:
        for name, value, _ in rows:
            click.echo(f"{name}={value}")
        return
    table = Table(Column("setting", no_wrap=True), Column("value", overflow="fold"), "meaning")
    for row in rows:
        table.add_row(*row)
    show(table)


def _worker_rows() -> list[Row]:
    """A worker knows its own settings, in a process that may import it. Raises CommandError."""
    command = [sys.executable, "-m", "worker", "config", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().rpartition("\n")[2].removeprefix("Error: ")
        raise CommandError(f"the worker's settings cannot be read: {said}")
    return [(name, value, meaning) for name, value, meaning in json.loads(done.stdout)]


def _shown(name: str, settings: Settings) -> str:
    value = getattr(settings, name)
    if name == "database_url":
        return masked(settings.effective_database_url)
    if name == "redis_url" and value is not None:
        return masked(value.get_secret_value())
    if name == "store":
        return settings.effective_store
    if isinstance(value, SecretStr):
        return "********"
    return "" if value is None else str(value)
