"""`python -m worker generate`: a file of prompts in, a file of answers out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import click
import msgspec

from worker.protocol.types import SamplingParams
from worker.runtime.errors import StartError
from worker.runtime.options import engine_options
from worker.settings import EngineSettings

CONTENT = ("prompt", "prompt_ids", "messages")
DEFAULT_TOKENS = 128


def _in_a_folder(ctx: click.Context, param: click.Parameter, output: IO[str]) -> IO[str]:
    """Known before a model is loaded, while what the file holds stays until there is an answer."""
    folder = Path(output.name).parent
    if not folder.is_dir():
        raise click.BadParameter(f"there is no folder {folder}")
    return output


@click.command
@click.argument("prompts", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.File("w", lazy=True),
    default="-",
    callback=_in_a_folder,
    help="Default: standard output.",
)
@engine_options
def generate(prompts: Path, output: IO[str], **options: Any) -> None:
    """Answer the prompts of a JSONL file, without Redis or a gateway.

    A line is {"prompt": "text"}, {"prompt_ids": [1, 2]} or {"messages": [...]}, with any of id,
    adapter (a PEFT folder), max_tokens (128), temperature, top_p, top_k, min_p, n, seed, stop,
    logprobs, ignore_eos and the penalties. Answers are written in the order of the lines. Ends with
    status 1 when a line fails; the others have their answers all the same.
    """
    if not options["model"]:
        raise click.UsageError("no model: give --model or set BATTEN_MODEL to a folder or hub id")
    lines = list(read_lines(prompts))
    failures: list[str] = []
    from worker.runtime.offline import OfflineEngine, Prompt
    from worker.runtime.own_kernels import check_own_kernels

    try:
        check_own_kernels()
        with OfflineEngine(EngineSettings(**options)) as engine:
            work = [Prompt(content, sampling, adapter) for _, content, sampling, adapter in lines]
            with click.progressbar(length=len(work), label="answers", file=sys.stderr) as bar:
                answers = _in_order(engine.stream(work), lambda: bar.update(1))
                for (name, *_), answer in zip(lines, answers, strict=True):
                    output.write(_line(name, answer) + "\n")
                    if answer.error is not None:
                        failures.append(f"{name}: {answer.error}")
    except StartError as error:
        raise click.ClickException(str(error)) from error
    if failures:
        raise click.ClickException(
            f"{len(failures)} of {len(lines)} lines failed, the first with id {failures[0]}"
        )


def _in_order(answers: Iterator[Any], heard: Callable[[], None]) -> Iterator[Any]:
    """By their index, each as soon as all before it are there; `heard` is called for every one."""
    held: dict[int, Any] = {}
    following = 0
    for answer in answers:
        held[answer.index] = answer
        heard()
        while following in held:
            yield held.pop(following)
            following += 1


def read_lines(path: Path) -> Iterator[tuple[Any, Any, SamplingParams, str | None]]:
    """(id, content, sampling, adapter) of each line. Raises click.ClickException."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                fields = msgspec.json.decode(line, type=dict[str, Any])
                yield _parse(fields, fields.pop("id", number))
            except (msgspec.MsgspecError, ValueError) as error:
                raise click.ClickException(f"{path}:{number}: {error}") from error


def _parse(fields: dict[str, Any], id: Any) -> tuple[Any, Any, SamplingParams, str | None]:
    given = [name for name in CONTENT if name in fields]
    if len(given) != 1:
        raise ValueError(f"a line has one of {', '.join(CONTENT)}, not {given or 'none'}")
    content, adapter = fields.pop(given[0]), fields.pop("adapter", None)
    unknown = sorted(fields.keys() - set(SamplingParams.__struct_fields__))
    if unknown:
        raise ValueError(f"unknown: {', '.join(unknown)}")
    sampling = msgspec.convert({"max_tokens": DEFAULT_TOKENS, **fields}, SamplingParams)
    return id, content, sampling, adapter


def _line(id: Any, answer: Any) -> str:
    if answer.error is not None:
        body: Mapping[str, Any] = {"id": id, "error": answer.error}
    else:
        choices = msgspec.to_builtins(answer.choices)
        body = {"id": id, "choices": choices, "usage": msgspec.to_builtins(answer.usage)}
    return json.dumps(body, ensure_ascii=False)
