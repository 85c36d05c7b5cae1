"""`python -m worker verify`: an adapter in our engine and in PEFT, number by number."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from worker.runtime.errors import StartError

NEEDED = {"torch": "batten[worker]", "transformers": "batten[worker]", "peft": "peft==0.21.2"}


@click.command
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--model",
    envvar="BATTEN_MODEL",
    help="Base model: a local folder or a hub id; default: the one that the adapter names.",
)
@click.option("--prompt", "prompts", multiple=True, help="Instead of the sample prompts.")
@click.option("--tokens", type=click.IntRange(1), default=16, show_default=True)
@click.option(
    "--tolerance",
    type=click.FloatRange(0, min_open=True),
    default=1e-4,
    show_default=True,
    help="Largest relative error of a position's logits.",
)
@click.option("--threads", type=click.IntRange(1), help="Default: the physical cores.")
@click.pass_context
def verify(ctx: click.Context, /, folder: Path, **options: Any) -> None:
    """Compare the adapter in PEFT FOLDER with PEFT itself, in float32.

    Every prompt is answered greedily, with the adapter and by the base model in the same steps.
    PEFT then computes the same positions: logits must agree within the tolerance, and PEFT must
    choose the same tokens. Exit status 1 when anything differs.
    """
    for module, package in NEEDED.items():
        if find_spec(module) is None:
            raise click.ClickException(
                f"{module} is not installed, which verify compares with: pip install {package}"
            )
    from worker.runtime.verify_report import compare

    try:
        comparison = compare(folder, **options)
    except StartError as error:
        raise click.ClickException(str(error)) from error
    click.echo("\n".join(comparison.lines))
    ctx.exit(0 if comparison.agrees else 1)
