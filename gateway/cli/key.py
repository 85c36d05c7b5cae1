from __future__ import annotations

import click
from rich.table import Column, Table

from gateway.cli.tables import show


@click.group
def key() -> None:
    """API keys. A secret is shown once: the database keeps its hash."""


@key.command
@click.argument("tenant", required=False)
@click.option("--name", default="default", show_default=True, help="What the key is for.")
@click.option("--scope", "scopes", multiple=True, help="Such as jobs:read; default: all.")
@click.option("--admin", is_flag=True, help="An operator's key: it belongs to no tenant.")
def create(tenant: str | None, name: str, scopes: tuple[str, ...], admin: bool) -> None:
    """Create a key for TENANT (name or id) and print the secret."""
    from gateway.cli.checked import checked
    from gateway.cli.database import transact
    from gateway.kit.database import WriteSession
    from gateway.tenants.schemas import CreateKey
    from gateway.tenants.service import create_key, find_tenant

    _check_owner(tenant, admin)
    if admin and scopes:
        raise click.UsageError("--scope is for a tenant's key: an operator's has all of /v1/admin")
    wanted = checked(CreateKey, tenant=tenant, name=name, scopes=list(scopes or ("all",)))

    async def work(session: WriteSession) -> str:
        owner = None if tenant is None else (await find_tenant(session, tenant)).id
        return (await create_key(session, owner, wanted.name, wanted.scopes)).secret

    click.echo(transact(work))


@key.command(name="list")
@click.argument("tenant", required=False)
@click.option("--admin", is_flag=True, help="The operators' keys.")
def list_(tenant: str | None, admin: bool) -> None:
    """List the keys of TENANT (name or id), newest first: their ids, and how each secret begins
    and ends."""
    from gateway.cli.database import transact
    from gateway.kit.clock import now_ms
    from gateway.kit.database import WriteSession
    from gateway.tenants.repository import TenantRepository
    from gateway.tenants.service import find_tenant

    _check_owner(tenant, admin)
    now = now_ms()

    async def work(session: WriteSession) -> list[tuple[str, str, str, str, str]]:
        owner = None if tenant is None else (await find_tenant(session, tenant)).id
        return [
            (row.id, row.name, row.hint, ", ".join(row.scopes), row.state(now))
            for row in await TenantRepository(session).keys_of(owner)
        ]

    table = Table(Column("id", no_wrap=True), "name", "secret", "scopes", "state")
    for row in transact(work):
        table.add_row(*row)
    show(table)


@key.command
@click.argument("key_id")
def revoke(key_id: str) -> None:
    """Revoke the key with this id (`batten key list` shows it), at once and for good."""
    from gateway.cli.database import transact
    from gateway.kit.database import WriteSession
    from gateway.tenants.service import revoke_key

    async def work(session: WriteSession) -> None:
        await revoke_key(session, key_id)

    transact(work)
    click.echo(f"{key_id} is revoked.")


def _check_owner(tenant: str | None, admin: bool) -> None:
    if admin == (tenant is not None):
        raise click.UsageError("give either TENANT or --admin")
