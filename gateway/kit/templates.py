"""Chat templates, rendered as Hugging Face's `apply_chat_template` does: Jinja in a sandbox.

https://huggingface.co/docs/transformers/chat_templating — the environment (trimmed blocks, loop
controls, `tojson` without HTML escapes, `raise_exception`, `strftime_now`, `{% generation %}`) is
theirs, so that the same template gives the same text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateRefused(Exception):
    """The template does not accept these messages: its own words say why."""


class ChatTemplate:
    """`special_tokens` are the names that a template may use, such as bos_token."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._template = _compile(source)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt, up to where the assistant speaks. Raises TemplateRefused."""
        try:
            return self._template.render(
                **self._special_tokens,
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise TemplateRefused(str(error)) from error


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks what to train on; here it is its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)  # noqa: DTZ005  templates expect local time
