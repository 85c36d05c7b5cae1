from __future__ import annotations

import click

from gateway.cli.configuration import load_settings


@click.command
def audit() -> None:
    """Check that usage, outputs, batches and invoices agree; exit 1 and a list when not."""
    from gateway.billing.audit import run_audit
    from gateway.cli.database import check_deployed

    settings = load_settings()
    check_deployed(settings)
    problems = run_audit(settings)
    for problem in problems:
        click.echo(problem)
    if problems:
        raise click.exceptions.Exit(1)
    click.echo("Every token is accounted for once.")
