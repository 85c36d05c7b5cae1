"""The tokenizer files beside an adapter: what they change about its prompts, or why they can't.

tokenizer.json                     must make the same tokens as the base model's
chat template, special tokens      served, where they differ from the base model's
eos_token                          ends answers too, where it differs
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from jinja2 import TemplateSyntaxError
from tokenizers import Tokenizer

from gateway.kit.prompts import read_json, special_tokens_of, template_text
from gateway.kit.templates import ChatTemplate
from worker.protocol.peft import Problem

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
FILES = (
    TOKENIZER,
    CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
# Of tokenizers that are not in tokenizer.json: compared byte by byte, if they come without it.
SLOW_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt")
_MAKES_TOKENS = ("model", "normalizer", "pre_tokenizer", "post_processor", "decoder")
_LISTED = 5


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """How an adapter's prompts differ from the base model's. `stop_token_id` ends its answers, as
    well as what ends the base model's."""

    chat_template: str | None
    special_tokens: dict[str, str]
    stop_token_id: int | None


def read_prompt_format(
    folder: Path, base: Path, most_chars: int
) -> PromptFormat | list[Problem] | None:
    """None when nothing differs. `base` is the folder of the base model's tokenizer."""
    try:
        problems = [*_other_tokens(folder, base)]
        if problems:
            return problems
        return _prompt_format(folder, base, most_chars)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return [Problem("adapter_invalid_tokenizer", CONFIG, f"cannot be read: {error}")]


def _other_tokens(folder: Path, base: Path) -> Iterator[Problem]:
    if (folder / TOKENIZER).is_file():
        yield from _compare_tokenizers(folder / TOKENIZER, base / TOKENIZER)
    else:
        for name in SLOW_FILES:
            if (folder / name).is_file() and not _same_file(folder / name, base / name):
                yield Problem("adapter_tokenizer_differs", name, "is not the base model's")
    if (folder / "added_tokens.json").is_file():
        tokenizer = _load(base / TOKENIZER)
        for token, number in read_json(folder / "added_tokens.json").items():
            if tokenizer.token_to_id(token) != number:
                yield _added("added_tokens.json", [token])
                return


def _same_file(path: Path, other: Path) -> bool:
    return other.is_file() and path.read_bytes() == other.read_bytes()


def _load(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ValueError(f"{path.name}: {error}") from error


def _compare_tokenizers(path: Path, base: Path) -> Iterator[Problem]:
    """As this release of the library writes both: files of other releases spell alike things
    differently."""
    theirs, ours = (json.loads(_load(each).to_str()) for each in (path, base))
    added = [token for token in theirs["added_tokens"] if token not in ours["added_tokens"]]
    if added:
        yield _added(TOKENIZER, [str(token["content"]) for token in added])
        return
    for part in _MAKES_TOKENS:
        if theirs.get(part) != ours.get(part):
            message = f"its {part} is not the base model's, so it makes other tokens"
            yield Problem("adapter_tokenizer_differs", TOKENIZER, message)
    if len(theirs["added_tokens"]) != len(ours["added_tokens"]):
        message = "it lacks special tokens of the base model"
        yield Problem("adapter_tokenizer_differs", TOKENIZER, message)


def _added(file: str, tokens: list[str]) -> Problem:
    names = ", ".join(repr(token) for token in tokens[:_LISTED])
    more = f" and {len(tokens) - _LISTED} more" if len(tokens) > _LISTED else ""
    message = f"adds or changes the tokens {names}{more}: an adapter's own tokens are not served"
    return Problem("adapter_added_tokens", file, message)


def _prompt_format(
    folder: Path, base: Path, most_chars: int
) -> PromptFormat | list[Problem] | None:
    """Special tokens count where the template names them; a pad token, for one, changes nothing."""
    config, base_config = read_json(folder / CONFIG), read_json(base / CONFIG)
    base_tokens = special_tokens_of(base_config)
    named = special_tokens_of(read_json(folder / "special_tokens_map.json"))
    tokens = base_tokens | named | special_tokens_of(config)
    base_template = template_text(base, base_config)
    template = template_text(folder, config) or base_template
    eos = tokens.get("eos_token")
    other_eos = eos if eos != base_tokens.get("eos_token") else None
    used = _used(template, tokens)
    if template == base_template and used == _used(template, base_tokens) and other_eos is None:
        return None
    tokenizer = _load(base / TOKENIZER)
    wanted = {*used.values(), *([other_eos] if other_eos is not None else [])}
    if unknown := [each for each in sorted(wanted) if tokenizer.token_to_id(each) is None]:
        return [_added(CONFIG, unknown)]
    if problem := _unusable(template, used, most_chars):
        return [problem]
    stop = None if other_eos is None else tokenizer.token_to_id(other_eos)
    return PromptFormat(template, used, stop)


def _used(template: str | None, tokens: Mapping[str, str]) -> dict[str, str]:
    return {name: token for name, token in tokens.items() if template and name in template}


def _unusable(source: str | None, tokens: Mapping[str, str], most_chars: int) -> Problem | None:
    if source is None:
        return None
    if len(source) > most_chars:
        message = f"{len(source)} characters, at most {most_chars} are allowed"
        return Problem("adapter_chat_template_invalid", "chat_template", message)
    try:
        ChatTemplate(source, tokens)
    except TemplateSyntaxError as error:
        message = f"line {error.lineno}: {error.message}"
        return Problem("adapter_chat_template_invalid", "chat_template", message)
    return None
