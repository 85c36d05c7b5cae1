"""Command-line options that every command with an engine shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import click

from worker.settings import DType, parse_bytes

Decorator = Callable[[Callable[..., None]], Callable[..., None]]


class Bytes(click.ParamType[int]):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_bytes(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _positive(default: int | None, name: str, help: str) -> Decorator:
    return click.option(
        f"--{name}",
        type=click.IntRange(1),
        default=default,
        envvar=f"BATTEN_{name.replace('-', '_').upper()}",
        show_default=default is not None,
        help=help,
    )


_OPTIONS: tuple[Decorator, ...] = (
    click.option("--model", envvar="BATTEN_MODEL", help="Base model: a local folder or a hub id."),
    click.option(
        "--dtype",
        type=click.Choice(get_args(DType)),
        default="auto",
        envvar="BATTEN_DTYPE",
        show_default=True,
        help="Type of the weights; auto: bfloat16 where the device computes in it.",
    ),
    click.option(
        "--kv-memory",
        type=Bytes(),
        envvar="BATTEN_KV_MEMORY",
        help="Memory for keys and values, such as 2GiB; default: what the device has left.",
    ),
    _positive(256, "max-sequences", "Most sequences running at once."),
    _positive(None, "token-budget", "Most tokens computed in one step; default: the device's."),
    _positive(256, "adapter-rank", "Sum of the ranks of the adapters on the device."),
    click.option(
        "--adapter-memory",
        type=Bytes(),
        default=1 << 30,
        show_default="1GiB",
        envvar="BATTEN_ADAPTER_MEMORY",
        help="Memory of the adapters on the device besides their ranks (experts, heads, ...).",
    ),
    click.option(
        "--store-patience",
        type=click.FloatRange(min=0),
        default=300.0,
        show_default=True,
        envvar="BATTEN_STORE_PATIENCE",
        help="Seconds that requests wait for their adapter while the object store is away.",
    ),
    _positive(None, "context-tokens", "Longest context; default: the model's."),
    click.option(
        "--pinned-share",
        type=click.FloatRange(0, 0.5),
        default=0.1,
        envvar="BATTEN_PINNED_SHARE",
        show_default=True,
        help="Share of the KV memory kept for system prompts that tenants share.",
    ),
    click.option(
        "--deterministic",
        is_flag=True,
        envvar="BATTEN_DETERMINISTIC",
        help="The same bits whatever else a step computes; slower.",
    ),
    _positive(None, "threads", "Compute threads; default: the physical cores."),
    click.option(
        "--pack-weights/--no-pack-weights",
        default=None,
        envvar="BATTEN_PACK_WEIGHTS",
        help="On a CPU, keep a second copy of the weights, which is multiplied faster; default: "
        "where it takes at most a quarter of the free memory.",
    ),
)


def engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """The fields of EngineSettings, as parameters of the same names."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def show_variables(command: click.Command) -> None:
    """Help and errors name the environment variable beside the option that it sets."""
    for option in command.params:
        if isinstance(option, click.Option):
            option.show_envvar = option.envvar is not None
