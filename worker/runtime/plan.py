"""`python -m worker plan`: what fits and how fast it could go, without loading weights."""

from __future__ import annotations

from typing import Any

import click

from worker.runtime.errors import StartError
from worker.runtime.options import Bytes

LENGTHS = (512, 2048, 8192)


@click.command
@click.argument("model", envvar="BATTEN_MODEL")
@click.option("--device", default="cpu", show_default=True, help="cpu, or a GPU such as h100.")
@click.option(
    "--memory",
    type=Bytes(),
    help="A GPU's memory, default its data sheet's; or what is free beside a CPU, default here.",
)
@click.option("--kv-memory", type=Bytes(), help="Memory for keys and values; default: the rest.")
@click.option("--flops", type=float, help="The device's peak in 16-bit matrix products.")
@click.option("--bandwidth", type=float, help="The device's peak in bytes a second.")
@click.option(
    "--dtype", type=click.Choice(["auto", "float32", "bfloat16"]), default="auto", show_default=True
)
@click.option("--adapter-rank", type=click.IntRange(0), default=256, show_default=True)
@click.option(
    "--adapter-memory",
    type=Bytes(),
    default=1 << 30,
    show_default="1GiB",
    help="Memory of adapters besides their ranks.",
)
@click.option("--token-budget", type=click.IntRange(1), help="Default: the device's.")
@click.option("--max-sequences", type=click.IntRange(1), default=256, show_default=True)
@click.option("--block-size", type=click.IntRange(1), default=16, show_default=True)
@click.option(
    "--length",
    "lengths",
    type=click.IntRange(1),
    multiple=True,
    help=f"Tokens of a sequence, prompt and answer; default: {', '.join(map(str, LENGTHS))}.",
)
@click.option(
    "--pack-weights/--no-pack-weights",
    default=None,
    help="A CPU's second copy of the weights; default: where at most a quarter of the rest.",
)
@click.option("--shared", type=click.IntRange(0), default=0, help="Tokens that all begin with.")
def plan(**options: Any) -> None:
    """Say from MODEL's config.json what fits a device: bytes per token, most tokens and
    sequences, and the batch from which decoding is bound by computing, not by memory."""
    from worker.runtime.plan_report import report

    try:
        click.echo("\n".join(report(**options)))
    except StartError as error:
        raise click.ClickException(str(error)) from error
