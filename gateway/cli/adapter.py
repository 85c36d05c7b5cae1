from __future__ import annotations

import os
import sys
from pathlib import Path

import click
from rich.table import Table

from gateway.cli.tables import show


@click.group
def adapter() -> None:
    """LoRA adapters: of a tenant, straight into the database and the store; and PEFT folders."""


@adapter.command
@click.argument("tenant")
@click.argument("name")
@click.argument("folder", type=click.Path(exists=True, path_type=Path))
@click.option("--base-model", help="Base model it was trained on; default: the only one.")
def add(tenant: str, name: str, folder: Path, base_model: str | None) -> None:
    """Add PEFT FOLDER (or a .zip or .tar.gz of one) as adapter NAME of TENANT, and check it.

    Prints name@revision. A name that exists gets a new revision.
    """
    from gateway.cli.adapter_add import add_adapter
    from gateway.cli.configuration import load_settings
    from gateway.kit.logging import configure_logging

    configure_logging("WARNING")
    added = add_adapter(load_settings(), tenant, name, folder, base_model)
    click.echo(f"{added.name}@{added.number}")


@adapter.command(name="list")
@click.argument("tenant")
def list_(tenant: str) -> None:
    """List TENANT's adapters that are ready, with the revision that answers to the name."""
    from gateway.adapters.repository import AdapterRepository
    from gateway.auth.scope import scope_for_background
    from gateway.cli.database import transact
    from gateway.kit.database import WriteSession
    from gateway.tenants.service import find_tenant

    async def work(session: WriteSession) -> list[tuple[str, ...]]:
        scope = scope_for_background((await find_tenant(session, tenant)).id)
        return [
            (row.name, str(revision.number), str(revision.rank), (revision.digest or "")[:12])
            for row, revision in await AdapterRepository(session, scope).promoted()
        ]

    table = Table("name", "revision", "rank", "digest")
    for row in transact(work):
        table.add_row(*row)
    show(table)


@adapter.command
@click.argument("folder", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--model",
    envvar="BATTEN_MODEL",
    show_envvar=True,
    help="Base model to check against: a folder or a hub id.",
)
@click.option("--most-rank", type=click.IntRange(1), help="Largest rank that workers take.")
@click.pass_context
def inspect(ctx: click.Context, folder: Path, model: str | None, most_rank: int | None) -> None:
    """Say what PEFT FOLDER (or an archive of one) holds, and whether it is served exactly.

    Without --model the base model of the adapter's config is used, if it is a folder here. Exit
    status 1 and the reasons when the adapter is refused: of options that are not served the
    first, else all.
    """
    from gateway.cli.adapter_inspect import inspect

    inspection = inspect(folder, model, most_rank)
    click.echo("\n".join(inspection.lines))
    ctx.exit(1 if inspection.problems else 0)


@adapter.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def verify(arguments: tuple[str, ...]) -> None:
    """Compare an adapter with PEFT itself. All arguments go to `python -m worker verify`."""
    os.execv(sys.executable, [sys.executable, "-m", "worker", "verify", *arguments])
