"""Renders strangers' chat templates, in a process that may be ended at any time.

The sandbox keeps a template from reading or calling what it must not; it can't keep one from
looping for ever or filling memory. So: limited memory, no secrets in the environment, and a parent
that ends this process when an answer takes too long (`gateway.kit.template_process`). Should the
parent be gone by then, a limit on processor time does it.
"""

from __future__ import annotations

import resource
import struct
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, BinaryIO

import msgspec
from jinja2 import TemplateError

from gateway.kit.templates import ChatTemplate, TemplateRefused

LENGTH = struct.Struct("<Q")


class Order(msgspec.Struct, frozen=True):
    source: str
    special_tokens: dict[str, str]
    messages: list[dict[str, Any]]


class Rendered(msgspec.Struct, frozen=True):
    """`text`, or why there is none."""

    text: str = ""
    refused: str | None = None


def main(memory: int, most_chars: int, seconds: int) -> None:
    """Orders on standard input, answers on standard output, until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    orders, answers = sys.stdin.buffer, sys.stdout.buffer
    while (order := read(orders)) is not None:
        _limit_processor_time(seconds)
        answer = _render(msgspec.msgpack.decode(order, type=Order), most_chars)
        answers.write(framed(msgspec.msgpack.encode(answer)))
        answers.flush()


def _limit_processor_time(seconds: int) -> None:
    """From now on; the kernel ends this process (SIGXCPU) when it is used up."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def framed(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


def read(file: BinaryIO) -> bytes | None:
    head = file.read(LENGTH.size)
    return file.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None


def _render(order: Order, most_chars: int) -> Rendered:
    try:
        tokens = tuple(sorted(order.special_tokens.items()))
        text = _template(order.source, tokens).render(order.messages)
    except (TemplateRefused, TemplateError) as error:
        return Rendered(refused=str(error)[:1000])
    except (RecursionError, MemoryError) as error:
        return Rendered(refused=f"it needs too much: {type(error).__name__}")
    if len(text) > most_chars:
        return Rendered(refused=f"it wrote more than {most_chars} characters")
    return Rendered(text)


@lru_cache(maxsize=64)
def _template(source: str, special_tokens: Sequence[tuple[str, str]]) -> ChatTemplate:
    tokens: Mapping[str, str] = dict(special_tokens)
    return ChatTemplate(source, tokens)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
