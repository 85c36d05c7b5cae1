"""One line of an input file: what OpenAI's Batch API takes, and its words for what it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.errors import ApiError
from gateway.jobs.storable import has_nul
from gateway.kit.json import InvalidJson, parse_json
from gateway.settings import Settings


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a line cannot run; `line` is physical and starts at 1, None for the whole file."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None

    def shown(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "message": self.message,
            "param": self.param,
            "line": self.line,
        }

    def body(self) -> dict[str, Any]:
        """As the error that the synchronous endpoint would answer."""
        return {
            "error": {
                "message": self.message,
                "type": "invalid_request_error",
                "param": self.param,
                "code": self.code,
            }
        }


@dataclass(frozen=True, slots=True)
class RawLine:
    """`data` is what lies at [offset, offset + length) of the file, None when it is too long."""

    number: int
    offset: int
    length: int
    data: bytes | None


@dataclass(frozen=True, slots=True)
class ParsedLine:
    custom_id: str
    model: str
    body: dict[str, Any]


class LineRefused(Exception):
    """`custom_id` is what the line calls itself, as far as it can be read."""

    def __init__(self, problem: Problem, custom_id: str | None = None) -> None:
        super().__init__(problem.message)
        self.problem = problem
        self.custom_id = custom_id


def parse_line(line: RawLine, endpoint: str, settings: Settings) -> ParsedLine:
    """Raises LineRefused with the first problem."""
    value = _object(line, settings)
    custom_id = _custom_id(line, value, settings)
    try:
        _check_envelope(line, value, endpoint)
        return ParsedLine(custom_id, _model(line, value["body"]), value["body"])
    except LineRefused as refused:
        raise LineRefused(refused.problem, custom_id) from None


def refused_body(line: RawLine, custom_id: str, error: ApiError) -> LineRefused:
    """What the synchronous endpoint says of the body, as a problem of the line."""
    param = "body" if error.param is None else f"body.{error.param}"
    problem = Problem(error.code or "invalid_request", error.message, param, line.number)
    return LineRefused(problem, custom_id)


def model_unknown(line: RawLine, custom_id: str, model: str) -> LineRefused:
    problem = Problem(
        "model_not_found",
        f"The provided model '{model}' is not supported by the Batch API.",
        "body.model",
        line.number,
    )
    return LineRefused(problem, custom_id)


def duplicate(line: RawLine, custom_id: str) -> LineRefused:
    """Its custom_id belongs to the earlier line: it is in the message alone."""
    problem = Problem(
        "duplicate_custom_id",
        f"The custom_id '{custom_id}' was used by an earlier line: it must be unique.",
        "custom_id",
        line.number,
    )
    return LineRefused(problem)


def _object(line: RawLine, settings: Settings) -> dict[str, Any]:
    if line.data is None:
        raise _refused(
            line, "line_too_long", f"This line is longer than {settings.line_bytes} bytes."
        )
    try:
        value = parse_json(line.data)
    except InvalidJson:
        value = None
    if not isinstance(value, dict):
        raise _refused(line, "invalid_json_line", "This line is not parseable as valid JSON.")
    return value


def _custom_id(line: RawLine, value: dict[str, Any], settings: Settings) -> str:
    _require(line, value, "custom_id", str, "a string")
    custom_id: str = value["custom_id"]
    if not custom_id or len(custom_id) > settings.custom_id_chars or has_nul(custom_id):
        raise _refused(
            line,
            "invalid_value",
            f"Invalid 'custom_id': expected 1 to {settings.custom_id_chars} characters, no NUL.",
            "custom_id",
        )
    return custom_id


def _check_envelope(line: RawLine, value: dict[str, Any], endpoint: str) -> None:
    _require(line, value, "method", str, "a string")
    if value["method"] != "POST":
        raise _refused(line, "invalid_value", "Invalid 'method': expected 'POST'.", "method")
    _require(line, value, "url", str, "a string")
    if value["url"] != endpoint:
        raise _refused(
            line,
            "invalid_url",
            "The URL provided for this request does not match the batch endpoint.",
            "url",
        )
    _require(line, value, "body", dict, "an object")
    if value["body"].get("stream"):
        name = "Chat Completions" if "chat" in endpoint else "Completions"
        raise _refused(
            line,
            "streaming_unsupported",
            f"{name}: Streaming is not supported in the Batch API.",
            "body.stream",
        )


def _model(line: RawLine, body: dict[str, Any]) -> str:
    model = body.get("model")
    if model is None:
        raise _refused(line, "invalid_request", "Model parameter is required.", "body.model")
    if not isinstance(model, str):
        message = "Invalid type for 'body.model': expected a string."
        raise _refused(line, "invalid_type", message, "body.model")
    return model


def _require(
    line: RawLine, value: dict[str, Any], name: str, kind: type[Any], expected: str
) -> None:
    if value.get(name) is None:
        message = f"Missing required parameter: '{name}'."
        raise _refused(line, "missing_required_parameter", message, name)
    if not isinstance(value[name], kind):
        message = f"Invalid type for '{name}': expected {expected}."
        raise _refused(line, "invalid_type", message, name)


def _refused(line: RawLine, code: str, message: str, param: str | None = None) -> LineRefused:
    return LineRefused(Problem(code, message, param, line.number))
