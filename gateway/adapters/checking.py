"""Whether an uploaded PEFT folder can be served: every reason why not. Maps the weights rather
than reading them. Run by `gateway.adapters.examiner`: what it reads is a stranger's."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.adapters.folder_files import PICKLE, missing_from
from gateway.adapters.prompt_files import FILES, SLOW_FILES, PromptFormat, read_prompt_format
from worker.protocol.peft import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterConfigError,
    PeftConfig,
    Problem,
    SafetensorsError,
    SafetensorsHeader,
    adapter_rank,
    digest,
    find_not_finite,
    parse_config,
    parse_header,
    validate,
)

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class CheckedAdapter:
    digest: str
    rank: int
    bytes: int
    config: dict[str, Any]
    prompt_format: PromptFormat | None = None


@dataclass(frozen=True, slots=True)
class PromptBase:
    """What tokenizer files are compared with: those in `folder`."""

    folder: str
    most_chars: int


def check(
    folder: Path,
    shapes: Shapes | None,
    most_rank: int | None,
    most_bytes: int,
    prompts: PromptBase | None = None,
) -> CheckedAdapter | list[Problem]:
    """`most_rank` is what workers announced, if any did. Without `shapes` and `prompts` nothing
    is compared with a base model."""
    problems = _missing(folder)
    if problems:
        return problems
    raw = (folder / CONFIG_FILE).read_bytes()
    config = _config(raw)
    weights = folder / WEIGHTS_FILE
    if weights.stat().st_size == 0:
        return [*_problems(config), Problem("adapter_invalid_weights", WEIGHTS_FILE, "empty")]
    with _mapped(weights) as view:
        header = _header(view)
        if not isinstance(config, PeftConfig) or not isinstance(header, SafetensorsHeader):
            return [*_problems(config), *_problems(header)]
        problems = [] if shapes is None else validate(config, header, shapes, most_bytes)
        problems += find_not_finite(header, view)
        rank = adapter_rank(config, header)
        if most_rank is not None and rank > most_rank:
            message = f"rank {rank}, workers take at most {most_rank}"
            problems.append(Problem("adapter_rank_too_large", CONFIG_FILE, message))
        prompt_format = _prompt_format(folder, prompts)
        if isinstance(prompt_format, list):
            problems += prompt_format
        if problems or isinstance(prompt_format, list):
            return problems
        size = weights.stat().st_size + len(raw)
        return CheckedAdapter(
            digest(config, header, view), rank, size, json.loads(raw), prompt_format
        )


def _prompt_format(folder: Path, prompts: PromptBase | None) -> PromptFormat | list[Problem] | None:
    has_files = any((folder / name).is_file() for name in (*FILES, *SLOW_FILES))
    if prompts is None or not has_files:
        return None
    return read_prompt_format(folder, Path(prompts.folder), prompts.most_chars)


@contextmanager
def _mapped(path: Path) -> Iterator[memoryview]:
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        memoryview(data) as view,
    ):
        yield view


def _missing(folder: Path) -> list[Problem]:
    missing = missing_from(folder)
    if WEIGHTS_FILE in missing and (folder / PICKLE).is_file():
        message = "a pickle can run code when it is loaded: save with safe_serialization=True"
        return [Problem("adapter_pickle_refused", PICKLE, message)]
    return [Problem("adapter_missing_file", name, "is missing") for name in missing]


def _config(raw: bytes) -> PeftConfig | Problem:
    try:
        return parse_config(raw)
    except AdapterConfigError as error:
        return Problem(error.code, error.param or CONFIG_FILE, str(error))
    except (OverflowError, RecursionError) as error:
        return Problem("adapter_invalid_config", CONFIG_FILE, str(error))


def _header(view: memoryview) -> SafetensorsHeader | Problem:
    try:
        return parse_header(view)
    except SafetensorsError as error:
        return Problem("adapter_invalid_weights", WEIGHTS_FILE, str(error))


def _problems(value: object) -> list[Problem]:
    return [value] if isinstance(value, Problem) else []
