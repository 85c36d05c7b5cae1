from __future__ import annotations

import click
from rich.table import Table

from gateway.cli.tables import show


@click.group
def tenant() -> None:
    """Tenants: who pays, and whose limits apply."""


@tenant.command
@click.argument("name")
@click.option(
    "--weight", default=1.0, show_default=True, help="Fair share beside other tenants, up to 1000."
)
def create(name: str, weight: float) -> None:
    """Create a tenant and print its id."""
    from gateway.cli.checked import checked
    from gateway.cli.database import transact
    from gateway.kit.database import WriteSession
    from gateway.tenants.schemas import CreateTenant
    from gateway.tenants.service import create_tenant

    wanted = checked(CreateTenant, name=name, weight=weight)

    async def work(session: WriteSession) -> str:
        return (await create_tenant(session, wanted.name, wanted.weight)).id

    click.echo(transact(work))


@tenant.command(name="list")
def list_() -> None:
    """List tenants."""
    from gateway.cli.database import transact
    from gateway.kit.database import WriteSession
    from gateway.tenants.repository import TenantRepository

    async def work(session: WriteSession) -> list[tuple[str, str, str, str]]:
        return [
            (row.id, row.name, f"{row.weight:g}", "suspended" if row.suspended_at else "active")
            for row in await TenantRepository(session).all()
        ]

    table = Table("id", "name", "weight", "state")
    for row in transact(work):
        table.add_row(*row)
    show(table)
