from __future__ import annotations

import click

from gateway.cli.configuration import load_settings


@click.command
def migrate() -> None:
    """Bring the database to this release's schema. Safe to run again, and by several at once."""
    from gateway.kit import migrations

    settings = load_settings()
    migrations.migrate(settings.effective_database_url)
    click.echo("The database is up to date.")
