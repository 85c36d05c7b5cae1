"""The OpenAPI document: what FastAPI knows of the routes, and what is the same for all of them.

Errors have one shape, whatever their status; every route below `/v1` takes an API key.
"""

from __future__ import annotations

from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from gateway.errors import ApiError

Operation = dict[str, Any]

_KEY = "api_key"
_WRITES = frozenset({"post", "put", "patch"})
_ERROR_SCHEMA: dict[str, Any] = {
    "title": "Error",
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string", "description": "For people"},
                "type": {"type": "string", "description": "The kind of error"},
                "param": {"type": ["string", "null"], "description": "Where it is wrong"},
                "code": {"type": ["string", "null"], "description": "For programs"},
            },
        }
    },
}
_MESSAGES = {
    400: ("Missing required parameter: 'model'.", "missing_required_parameter", "model"),
    401: ("Incorrect API key provided.", "invalid_api_key", None),
    403: ("This key lacks the scope files:write.", "insufficient_permissions", None),
    404: ("No such object: 'file_0'.", None, "id"),
    405: ("Not allowed to PUT on /v1/files.", "method_not_supported", None),
    409: ("Cannot cancel a job with status 'completed'.", None, None),
    413: ("The request body is larger than 4194304 bytes.", "body_too_large", None),
    415: ("Unsupported content type 'text/plain'.", "unsupported_content_type", None),
    429: ("Rate limit reached for requests.", "rate_limit_exceeded", None),
    500: ("The server had an error while processing your request.", "internal_error", None),
    503: ("The service is temporarily unavailable.", "service_unavailable", None),
}


def document(app: FastAPI) -> dict[str, Any]:
    """Made once, at the first call."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = made["components"]["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        schemas["Error"] = _ERROR_SCHEMA
        made["components"]["securitySchemes"] = {
            _KEY: {"type": "http", "scheme": "bearer", "description": "An API key, `bt_…`"}
        }
        for method, path, operation in _operations(made):
            _complete(method, path, operation)
        app.openapi_schema = made
    return app.openapi_schema


def _operations(made: dict[str, Any]) -> Iterator[tuple[str, str, Operation]]:
    for path, methods in made["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


def _complete(method: str, path: str, operation: Operation) -> None:
    responses = operation["responses"]
    responses.pop("422", None)
    if not path.startswith("/v1/"):
        return
    operation["security"] = [{_KEY: []}]
    statuses = [400, 401, 403, 404, 405, 500, 503]
    if method != "get":
        statuses += [409, 429]
    if method in _WRITES:
        statuses += [413, 415]
    for status in statuses:
        responses.setdefault(str(status), _error_response(status))


def _error_response(status: int) -> dict[str, Any]:
    message, code, param = _MESSAGES[status]
    body = {"message": message, "type": _type_of(status), "param": param, "code": code}
    content = {"schema": {"$ref": "#/components/schemas/Error"}, "example": {"error": body}}
    response: dict[str, Any] = {
        "description": HTTPStatus(status).phrase,
        "content": {"application/json": content},
    }
    if status == 405:
        response["headers"] = {"Allow": {"schema": {"type": "string"}}}
    return response


def _type_of(status: int) -> str:
    kinds = {kind.status: kind.type for kind in ApiError.__subclasses__()}
    return kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
