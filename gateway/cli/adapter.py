from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table


@click.group
def adapter() -> None:
    """LoRA adapters of a tenant, straight into the database and the store."""


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
    Console().print(table)
