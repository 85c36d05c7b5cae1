"""Any bytes are a file of lines: each runs or is refused with its number, and nothing breaks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from gateway.batches.lines import LineRefused, ParsedLine, RawLine, parse_line
from gateway.batches.reader import read_chunks
from gateway.errors import BadRequest
from gateway.jobs.generation import CHAT, COMPLETIONS, parse_generation
from gateway.kit.json import MAX_DEPTH, InvalidJson, parse_json
from gateway.kit.prompts import Prompts, load_prompts
from gateway.settings import Settings

LONGEST = 4096
SETTINGS = Settings(line_bytes=LONGEST)
BODY = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
BLANK = b" \t\r\n\x0b\x0c"
CODES = {
    "invalid_json_line",
    "line_too_long",
    "missing_required_parameter",
    "invalid_type",
    "invalid_value",
    "invalid_url",
    "streaming_unsupported",
    "invalid_request",
}
thorough = settings(
    max_examples=300, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)

texts = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["\u2028", "\u2029\x85", "\x00", "\ufeff", "\U0001f600", "x" * 600]),
)
numbers = st.one_of(
    st.integers(-3, 3), st.floats(), st.sampled_from([10**400, -(10**20), 2**63, 2**64, 1e308])
)
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=8,
)
envelopes = st.fixed_dictionaries(
    {},
    optional={
        "custom_id": st.one_of(st.sampled_from(["a", "b"]), values),
        "method": st.one_of(st.just("POST"), values),
        "url": st.one_of(st.just(CHAT), values),
        "body": st.one_of(st.just(BODY), st.just(BODY | {"stream": True}), values),
        "extra": values,
    },
)


def written(value: Any) -> bytes:
    """NaN and what else Python writes stay in."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


good = st.just(written({"custom_id": "a", "method": "POST", "url": CHAT, "body": BODY}))
nested = st.integers(1, 3000).map(lambda depth: b"[" * depth + b"]" * depth)
odd = st.sampled_from(
    [
        b"",
        b"   ",
        b"\xef\xbb\xbf",
        b"\xff\xfe",
        b"{",
        b"null",
        b"NaN",
        b'{"custom_id": "\\ud800"}',
        b'{"custom_id": "a", "custom_id": "b"}',
        b'{"custom_id": ' + b"9" * 4000 + b"}",
        b"x" * (LONGEST + 1),
        b"1e999",
    ]
)
line = st.one_of(good, odd, nested, envelopes.map(written), st.binary(max_size=40))
truncated = st.tuples(line, st.integers(1, 40)).map(lambda pair: pair[0][: -pair[1]])
files = st.tuples(
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
    st.lists(st.one_of(line, truncated), max_size=8),
    st.sampled_from([b"\n", b"\r\n"]),
    st.sampled_from([b"", b"\n"]),
).map(lambda parts: parts[0] + parts[2].join(parts[1]) + parts[3])


def lines_of(content: bytes, cuts: list[int]) -> list[RawLine]:
    """As they come from the store, cut anywhere."""
    places = sorted({0, len(content), *(cut % (len(content) + 1) for cut in cuts)})

    async def pieces() -> AsyncIterator[bytes]:
        for start, end in pairwise(places):
            yield content[start:end]

    async def read() -> list[RawLine]:
        return [
            line async for chunk in read_chunks(pieces(), 0, 0, LONGEST) for line in chunk.lines
        ]

    return asyncio.run(read())


def expected(content: bytes) -> list[tuple[int, bytes]]:
    """Numbers and texts, the plain way."""
    found = []
    for number, text in enumerate(content.split(b"\n"), 1):
        text = text.removeprefix(b"\xef\xbb\xbf") if number == 1 else text
        if text.strip(BLANK):
            found.append((number, text.rstrip(b"\r")))
    return found


@thorough
@given(st.one_of(files, st.binary(max_size=200)), st.lists(st.integers(0, 10**6), max_size=4))
def test_lines_are_what_lies_between_line_feeds(content: bytes, cuts: list[int]) -> None:
    lines = lines_of(content, cuts)
    wanted = expected(content)
    assert [each.number for each in lines] == [number for number, _ in wanted]
    for each, (_, text) in zip(lines, wanted, strict=True):
        assert each.data == (text if len(text) <= LONGEST else None)
        if each.data is not None:
            assert content[each.offset : each.offset + each.length] == each.data


def outcome(call: Callable[..., Any], *args: Any) -> Any:
    """What it returns, or the one kind of error that a client may see."""
    try:
        return call(*args)
    except (LineRefused, InvalidJson, BadRequest) as error:
        return error


@thorough
@given(files)
def test_a_line_runs_or_says_why_not(content: bytes) -> None:
    for each in lines_of(content, []):
        parsed = outcome(parse_line, each, CHAT, SETTINGS)
        if isinstance(parsed, ParsedLine):
            assert json.loads(each.data or b"")["custom_id"] == parsed.custom_id
            continue
        assert isinstance(parsed, LineRefused)
        assert parsed.problem.line == each.number
        assert parsed.problem.code in CODES
        assert written(parsed.problem.shown()).decode()
        assert parsed.custom_id is None or 0 < len(parsed.custom_id) <= 512


@thorough
@given(st.one_of(line, truncated, st.binary(max_size=60)))
def test_json_is_a_value_or_invalid(text: bytes) -> None:
    value = outcome(parse_json, text)
    if isinstance(value, InvalidJson):
        assert str(value)
    else:
        assert value == json.loads(text)


@pytest.mark.parametrize("depth", [MAX_DEPTH - 1, MAX_DEPTH, MAX_DEPTH + 1, 900, 100_000])
def test_depth_is_bounded(depth: int) -> None:
    for text in (b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth):
        if depth <= MAX_DEPTH:
            assert parse_json(text) is not None
        else:
            with pytest.raises(InvalidJson, match="nested too deeply"):
                parse_json(text)


@pytest.fixture(scope="module")
def prompts(tiny_model: Path) -> Prompts:
    return load_prompts(str(tiny_model))


PARAMETERS = [
    *("max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "n", "stop"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs"),
    *("top_logprobs", "seed", "ignore_eos", "stream", "messages", "prompt", "tools", "best_of"),
]
bodies = st.dictionaries(st.sampled_from(PARAMETERS), values, max_size=4)


@thorough
@given(bodies, st.booleans())
def test_any_body_is_a_generation_or_a_bad_request(
    prompts: Prompts, changed: dict[str, Any], chat: bool
) -> None:
    value = outcome(parse_json, written(changed))
    assume(not isinstance(value, InvalidJson))
    asked = ({"messages": BODY["messages"]} if chat else {"prompt": "Hi"}) | value
    parsed = outcome(parse_generation, CHAT if chat else COMPLETIONS, asked, prompts, 1)
    if isinstance(parsed, BadRequest):
        assert parsed.code
        assert parsed.message
    else:
        assert parsed.prompt_ids
