"""`batten plan`: the worker's own arithmetic, in a process that may import its libraries."""

from __future__ import annotations

import os
import sys

import click


@click.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def plan(arguments: tuple[str, ...]) -> None:
    """Say what fits a device. All arguments go to `python -m worker plan`."""
    os.execv(sys.executable, [sys.executable, "-m", "worker", "plan", *arguments])
