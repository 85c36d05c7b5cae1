from __future__ import annotations

import click
from pydantic import SecretStr
from rich.console import Console
from rich.table import Column, Table

from gateway.cli.configuration import load_settings, variable
from gateway.settings import Settings


@click.command
@click.option("--env", is_flag=True, help="Print NAME=value lines, secrets masked.")
def config(env: bool) -> None:
    """Show the effective settings, secrets masked."""
    settings = load_settings()
    rows = [
        (variable(name), _shown(name, settings), field.description or "")
        for name, field in Settings.model_fields.items()
    ]
    if env:
        for name, value, _ in rows:
            click.echo(f"{name}={value}")
        return
    table = Table(Column("setting", no_wrap=True), Column("value", overflow="fold"), "meaning")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _shown(name: str, settings: Settings) -> str:
    value = getattr(settings, name)
    if name == "database_url":
        return _masked(settings.effective_database_url)
    if name == "redis_url" and value is not None:
        return _masked(value.get_secret_value())
    if name == "store":
        return settings.effective_store
    if isinstance(value, SecretStr):
        return "********"
    return "" if value is None else str(value)


def _masked(url: str) -> str:
    """`redis://user:secret@host/0` → `redis://user:********@host/0`."""
    scheme, separator, rest = url.partition("://")
    credentials, at, host = rest.rpartition("@")
    if not at:
        return url
    user = credentials.partition(":")[0]
    return f"{scheme}{separator}{user}:********@{host}"
