"""How exceptions become OpenAI's error bodies. Nothing of a traceback leaves the process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import structlog
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from obstore.exceptions import BaseError as StoreError
from sqlalchemy.exc import DataError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.routing import Route

from gateway.errors import ApiError, BadRequest, Unavailable
from worker.queue.base import QueueUnavailable

RETRY_AFTER_SECONDS = 2

_log = structlog.get_logger(__name__)


def install_error_handlers(app: FastAPI, routers: Sequence[APIRouter] = ()) -> None:
    """`routers` know which methods a path has."""
    routes = [route for router in routers for route in router.routes if isinstance(route, Route)]

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        answer = _http(request, error)
        if error.status_code == 405:
            path = request.url.path
            methods = {
                method
                for route in routes
                if route.path_regex.match(path)
                for method in route.methods or ()
            }
            answer.headers["Allow"] = ", ".join(sorted(methods))
        return answer

    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(DataError, _unstorable)
    for error in (QueueUnavailable, OperationalError, InterfaceError, PoolTimeout, StoreError):
        app.add_exception_handler(error, _unavailable)


def error_response(error: ApiError) -> JSONResponse:
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    elif error.status == 429:
        headers["x-should-retry"] = "false"  # what OpenAI's clients heed
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error.body(), error.status, headers)


def internal_error() -> JSONResponse:
    return error_response(
        ApiError(
            "The server had an error while processing your request. Please retry it, and report "
            "the x-request-id if the error persists.",
            code="internal_error",
        )
    )


async def _api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _unavailable(request: Request, error: Exception) -> JSONResponse:
    _log.error("dependency_unavailable", error=type(error).__name__, exc_info=error)
    return error_response(
        Unavailable(
            "The service is temporarily unavailable. Please retry your request.",
            retry_after=RETRY_AFTER_SECONDS,
        )
    )


async def _unstorable(request: Request, error: Exception) -> JSONResponse:
    """Postgres keeps no NUL in text: an id that holds one is unknown, a value is refused."""
    _log.warning("unstorable_value", error=str(getattr(error, "orig", "")))
    return error_response(
        BadRequest("A value of this request cannot be stored.", code="invalid_value")
    )


def _http(request: Request, error: HTTPException) -> JSONResponse:
    code = None
    match error.status_code:
        case 404:
            message, code = f"Invalid URL ({request.method} {request.url.path})", "unknown_url"
        case 405:
            message = f"Not allowed to {request.method} on {request.url.path}."
            code = "method_not_supported"
        case _:
            message = str(error.detail)
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None}}
    body["error"]["code"] = code
    return JSONResponse(body, error.status_code, error.headers)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return error_response(validation_error(error.errors()))


def validation_error(errors: Sequence[Any]) -> BadRequest:
    """Pydantic's first complaint, in OpenAI's words."""
    first = errors[0]
    kind = first["type"]
    param = _path(first["loc"])
    if param is None:
        return BadRequest("A JSON object is required as the body of this request.")
    if kind == "missing":
        message, code = f"Missing required parameter: '{param}'.", "missing_required_parameter"
    elif kind == "extra_forbidden":
        message, code = f"Unknown parameter: '{param}'.", "unknown_parameter"
    elif kind.endswith("_type"):
        expected, got = _expected(kind), _json_type(first.get("input"))
        message = f"Invalid type for '{param}': expected {expected}, but got {got} instead."
        code = "invalid_type"
    else:
        message, code = f"Invalid value for '{param}': {_reason(first)}.", "invalid_value"
    return BadRequest(message, code=code, param=param)


def _reason(error: Any) -> str:
    reason = str(error["msg"]).removeprefix("Value error, ").rstrip(".")
    acronym = reason[1:2].isupper()
    return reason if acronym else reason[:1].lower() + reason[1:]


def _path(loc: tuple[str | int, ...]) -> str | None:
    path = ""
    for step in loc[1:]:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path or None


def _expected(kind: str) -> str:
    noun = kind.removesuffix("_type")
    names = {"int": "an integer", "float": "a number", "bool": "a boolean", "list": "an array"}
    names |= {"dict": "an object", "model": "an object", "model_attributes": "an object"}
    return names.get(noun, f"a {noun}")


def _json_type(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int():
            return "an integer"
        case float():
            return "a number"
        case str():
            return "a string"
        case list() | tuple():
            return "an array"
        case _:
            return "an object"
