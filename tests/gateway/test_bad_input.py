"""What every route of the document says to bodies and queries that nobody should send."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.gateway.conftest import ADMIN_KEY

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

JSON = "application/json"
DEEP = b'{"a":' * 600 + b"1" + b"}" * 600
WRONG_BODIES = [
    ("truncated", b'{"model": "tiny"', JSON, 400, "invalid_json"),
    ("nested", DEEP, JSON, 400, "invalid_json"),
    ("nested without an end", b"[" * 100_000, JSON, 400, "invalid_json"),
    ("NaN", b'{"temperature": NaN}', JSON, 400, "invalid_json"),
    ("Infinity", b'{"temperature": -Infinity}', JSON, 400, "invalid_json"),
    ("beyond a double", b'{"temperature": 1e999}', JSON, 400, "invalid_json"),
    ("lone surrogate", rb'{"model": "\ud800"}', JSON, 400, "invalid_json"),
    ("not UTF-8", b'{"model": "\xff"}', JSON, 400, "invalid_json"),
    ("byte order mark", b"\xef\xbb\xbf{}", JSON, 400, "invalid_json"),
    ("UTF-16", '{"model": "tiny"}'.encode("utf-16"), JSON, 400, "invalid_json"),
    ("two values", b"{} {}", JSON, 400, "invalid_json"),
    ("an array", b"[]", JSON, 400, None),
    ("a string", b'"tiny"', JSON, 400, None),
    ("a number", b"-1", JSON, 400, None),
    ("huge", b'{"x": "' + b"x" * 4 * 2**20 + b'"}', JSON, 413, "body_too_large"),
    ("text", b"{}", "text/plain", 415, "unsupported_content_type"),
    ("a form", b"a=b", "application/x-www-form-urlencoded", 415, "unsupported_content_type"),
    (
        "a form of parts",
        b"--b--",
        "multipart/form-data; boundary=b",
        415,
        "unsupported_content_type",
    ),
    ("huge parts", b"x" * 5 * 2**20, "multipart/form-data; boundary=b", 413, "body_too_large"),
    ("no content type", b"{}", "", 415, "unsupported_content_type"),
    ("charset", b"{}", "application/json; charset=utf-16", 415, "unsupported_charset"),
]


UPLOADS = {"/v1/files", "/v1/adapters", "/v1/admin/adapters"}


def error_of(answer: httpx.Response, what: str) -> dict[str, Any]:
    assert answer.headers["x-request-id"], what
    assert set(answer.json()) == {"error"}, what
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}, what
    return error


def operations(document: dict[str, Any], method: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        if method in methods and path.startswith("/v1/"):
            yield path, methods[method]


def url_of(path: str) -> str:
    return "/".join("x" if "{" in step else step for step in path.split("/"))


def headers_for(path: str, tenant: Any) -> dict[str, str]:
    admin = path.startswith("/v1/admin/")
    return {"Authorization": f"Bearer {ADMIN_KEY}"} if admin else dict(tenant.headers)


@pytest.mark.parametrize(
    ("body", "media", "status", "code"),
    [wrong[1:] for wrong in WRONG_BODIES],
    ids=[wrong[0] for wrong in WRONG_BODIES],
)
async def test_bodies(
    http: httpx.AsyncClient, tenant: Any, body: bytes, media: str, status: int, code: str | None
) -> None:
    document = (await http.get("/openapi.json")).json()
    tried = 0
    for path, operation in operations(document, "post"):
        if JSON not in operation.get("requestBody", {}).get("content", {}):
            continue
        headers = headers_for(path, tenant) | ({"Content-Type": media} if media else {})
        answer = await http.post(url_of(path), content=body, headers=headers)
        error = error_of(answer, path)
        assert (answer.status_code, error["code"]) == (status, code or error["code"]), path
        tried += 1
    assert tried > 15


@pytest.mark.parametrize("body", [b'{"model": "a\\u2028b",\r\n"x": 1}', b'{"a": 1, "a": 2}'])
async def test_bodies_that_are_json_are_read(
    client: httpx.AsyncClient, deployment: Any, body: bytes
) -> None:
    """U+2028 is text, CRLF is space, and the last of two equal names counts."""
    answer = await client.post("/v1/completions", content=body, headers={"Content-Type": JSON})
    assert error_of(answer, "")["code"] in {"model_not_found", "missing_required_parameter"}


@pytest.mark.parametrize(
    "media", ["application/json; charset=UTF-8", 'application/json;charset="utf-8"']
)
async def test_utf8_may_be_named(client: httpx.AsyncClient, media: str) -> None:
    answer = await client.post("/v1/completions", content=b"{}", headers={"Content-Type": media})
    assert error_of(answer, "")["code"] == "missing_required_parameter"


async def test_a_body_that_is_cut_off_is_no_call(
    app: FastAPI, http: httpx.AsyncClient, tenant: Any
) -> None:
    document = (await http.get("/openapi.json")).json()
    tried = 0
    for method in ("post", "patch"):
        for path, _ in operations(document, method):
            received = [{"type": "http.request", "body": b"{", "more_body": True}]
            headers = [(b"content-type", b"application/json"), (b"content-length", b"2")]
            headers += [
                (name.lower().encode(), value.encode())
                for name, value in headers_for(path, tenant).items()
            ]
            scope = {
                "type": "http",
                "method": method.upper(),
                "path": url_of(path),
                "query_string": b"",
                "headers": headers,
            }

            async def receive(received: list[Any] = received) -> Any:
                return received.pop() if received else {"type": "http.disconnect"}

            async def send(message: Any, path: str = path) -> None:
                raise AssertionError(f"{path} answered {message}")

            if path not in UPLOADS:
                await app(scope, receive, send)
                tried += 1
    assert tried > 25


async def test_queries(http: httpx.AsyncClient, tenant: Any) -> None:
    document = (await http.get("/openapi.json")).json()
    tried = 0
    for path, operation in operations(document, "get"):
        for parameter in operation.get("parameters", []):
            if parameter["in"] != "query":
                continue
            for value in wrong_values(parameter["schema"]):
                what = f"{path}?{parameter['name']}={value}"
                answer = await http.get(
                    url_of(path),
                    params={parameter["name"]: value},
                    headers=headers_for(path, tenant),
                )
                assert answer.status_code == 400, what
                assert error_of(answer, what)["param"] == parameter["name"]
                tried += 1
    assert tried > 40


def wrong_values(schema: dict[str, Any]) -> list[str]:
    kinds = schema.get("anyOf", [schema])
    if any("enum" in kind for kind in kinds):
        return ["sideways", ""]
    if any(kind.get("type") in {"integer", "number"} for kind in kinds):
        return ["x", "", "-1", "NaN", "9" * 400]
    return []


@pytest.mark.parametrize(
    "media",
    ["multipart/form-data", "multipart/form-data; boundary=", "multipart/form-data; boundary=b"],
)
async def test_forms_that_are_none(http: httpx.AsyncClient, tenant: Any, media: str) -> None:
    document = (await http.get("/openapi.json")).json()
    tried = 0
    for path, operation in operations(document, "post"):
        if "multipart/form-data" not in operation.get("requestBody", {}).get("content", {}):
            continue
        for body in (b"", b"junk", b"--b\r\n", b"--b\r\n\r\nx\r\n--b--\r\n"):
            headers = headers_for(path, tenant) | {"Content-Type": media}
            answer = await http.post(path, content=body, headers=headers)
            assert answer.status_code == 400, path
            assert error_of(answer, path)["code"] == "invalid_multipart"
            tried += 1
    assert tried >= 12


async def test_a_slash_too_many_is_answered_as_without_a_form(
    http: httpx.AsyncClient, tenant: Any
) -> None:
    for path in (f"{each}/" for each in sorted(UPLOADS)):
        headers = headers_for(path, tenant)
        wanted = await http.post(path, headers=headers)
        answer = await http.post(path, headers=headers, files={"file": ("a.jsonl", b"{}")})
        assert answer.status_code == wanted.status_code == (307 if "files" in path else 405), path
        assert answer.headers.get("location") == wanted.headers.get("location")


async def test_methods_that_a_path_lacks(http: httpx.AsyncClient, tenant: Any) -> None:
    document = (await http.get("/openapi.json")).json()
    for path, methods in document["paths"].items():
        answer = await http.request("TRACE", url_of(path), headers=headers_for(path, tenant))
        assert answer.status_code == 405, path
        named = set(answer.headers["allow"].lower().split(", "))
        assert set(methods) <= named, path
