"""The tree of commands."""

from __future__ import annotations

from importlib.metadata import version

import click

from gateway.cli.lazy import LazyCommand, LazyGroup

COMMANDS = {
    "up": LazyCommand("gateway.cli.up:up", "Run everything here: API, collector, control, workers"),
    "api": LazyCommand("gateway.cli.processes:api", "Run the HTTP API"),
    "collector": LazyCommand("gateway.cli.processes:collector", "Run the collector and dispatcher"),
    "control": LazyCommand("gateway.cli.processes:control", "Run the control tasks (Celery)"),
    "worker": LazyCommand("gateway.cli.processes:worker", "Run an engine: python -m worker"),
    "plan": LazyCommand("gateway.cli.plan:plan", "Say what fits a device, from a config.json"),
    "migrate": LazyCommand("gateway.cli.migrate:migrate", "Bring the database to this release"),
    "tenant": LazyCommand("gateway.cli.tenant:tenant", "Create and list tenants"),
    "key": LazyCommand("gateway.cli.key:key", "Create, list and revoke API keys"),
    "adapter": LazyCommand("gateway.cli.adapter:adapter", "Add and list LoRA adapters"),
    "batch": LazyCommand("gateway.cli.batch:batch", "Run a batch file through a server"),
    "config": LazyCommand("gateway.cli.config:config", "Show the effective settings"),
    "audit": LazyCommand("gateway.cli.audit:audit", "Check that every token is billed once"),
}


def _print_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        click.echo(f"batten {version('batten')}")
        ctx.exit()


@click.group(cls=LazyGroup, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
def root() -> None:
    """Serve many tenants' LoRA adapters from one shared base model."""
