"""Every refusal has OpenAI's shape and a request id; nothing internal leaks."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from gateway.app import create_app
from gateway.kit.json import InvalidJson, parse_json
from gateway.kit.logging import mask_secrets
from gateway.settings import Settings
from worker.queue.base import QueueUnavailable

on_sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


def error_of(answer: httpx.Response) -> dict[str, object]:
    assert answer.headers["x-request-id"].startswith("req_")
    assert set(answer.json()) == {"error"}
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    return answer.json()["error"]


@on_sqlite
async def test_unknown_urls_and_methods(client: httpx.AsyncClient) -> None:
    unknown = await client.get("/v1/nothing/here")
    assert unknown.status_code == 404
    assert error_of(unknown)["message"] == "Invalid URL (GET /v1/nothing/here)"
    wrong = await client.put("/v1/files")
    assert wrong.status_code == 405
    assert error_of(wrong)["type"] == "invalid_request_error"
    assert wrong.headers["allow"]


@on_sqlite
@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b'{"name": NaN}', 400, "NaN and Infinity are not JSON"),
        (b'{"name": "\\ud800"}', 400, "We could not parse"),
        (b'{"name": "x"', 400, "We could not parse"),
        (b"\xff\xfe", 400, "We could not parse"),
        (b'{"name": 1e999}', 400, "We could not parse"),
        (b"[" * 100_000, 400, "nested too deeply"),
        (b"", 400, "A JSON object is required"),
        (b"[]", 400, "A JSON object is required"),
        (b"{}", 400, "Missing required parameter: 'name'."),
        (b'{"name": []}', 400, "Invalid type for 'name': expected a string, but got an array"),
        (b'{"name": "x", "size": 1}', 400, "Unknown parameter: 'size'."),
        (b'{"name": "x", "weight": -1}', 400, "Invalid value for 'weight'"),
        (b'{"name": "' + b"x" * (5 * 2**20) + b'"}', 413, "larger than 4194304 bytes"),
    ],
)
async def test_bad_bodies(admin: httpx.AsyncClient, body: bytes, status: int, message: str) -> None:
    answer = await admin.post(
        "/v1/admin/tenants", content=body, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == status
    assert message in str(error_of(answer)["message"])


@on_sqlite
async def test_other_content_types(admin: httpx.AsyncClient) -> None:
    answer = await admin.post("/v1/admin/tenants", data={"name": "x"})
    assert (answer.status_code, error_of(answer)["code"]) == (415, "unsupported_content_type")


@on_sqlite
async def test_bad_query_parameters(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/files", params={"limit": "0"})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "limit")


@on_sqlite
@pytest.mark.parametrize(
    ("error", "status"), [(RuntimeError("bt_secret"), 500), (QueueUnavailable("redis"), 503)]
)
async def test_failures_show_nothing_of_themselves(
    app: FastAPI, http: httpx.AsyncClient, error: Exception, status: int
) -> None:
    @app.get("/broken")
    async def broken() -> None:
        raise error

    answer = await http.get("/broken")
    assert answer.status_code == status
    assert error_of(answer)["type"] == "server_error"
    assert str(error) not in answer.text
    assert ("retry-after" in answer.headers) == (status == 503)


@on_sqlite
async def test_a_database_that_is_gone_is_503(
    settings: Settings, tmp_path: Path, redis_url: str
) -> None:
    gone = settings.model_copy(
        update={"database_url": type(settings.admin_key)("postgresql://u@/d?host=/nowhere")}
    )
    app = create_app(gone)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://gateway.test"
        ) as http,
    ):
        answer = await http.get("/v1/files", headers={"Authorization": "Bearer bt_x"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        ready = await http.get("/readyz")
        assert ready.status_code == 503
        assert ready.json()["checks"] == {"database": "unavailable", "redis": "ok"}
        assert (await http.get("/healthz")).status_code == 200


@on_sqlite
async def test_probes_metrics_and_documents(http: httpx.AsyncClient) -> None:
    assert (await http.get("/readyz")).json() == {
        "status": "ok",
        "checks": {"database": "ok", "redis": "ok"},
        "workers": {},
    }
    await http.get("/v1/files/file_1")
    metrics = (await http.get("/metrics")).text
    line = 'batten_http_requests_total{method="GET",route="/v1/files/{file_id}",status="401"} 1.0'
    assert line in metrics
    paths = (await http.get("/openapi.json")).json()["paths"]
    assert {"/v1/files", "/v1/batches", "/v1/jobs", "/v1/models", "/v1/adapters"} <= set(paths)
    assert "multipart/form-data" in paths["/v1/files"]["post"]["requestBody"]["content"]
    assert (await http.get("/docs")).status_code == 200


def test_strict_json() -> None:
    assert parse_json(b'{"a": "\\ud83d\\ude00"}') == {"a": "😀"}
    with pytest.raises(InvalidJson, match="NaN"):
        parse_json(b"[NaN]")


def test_logs_mask_secrets() -> None:
    event = {
        "event": "x",
        "authorization": "Bearer abc",
        "url": "postgresql://user:hunter2@host/db",
        "queue": "cannot reach redis://host/0?password=hunter2&db=1",
        "exception": "key bt_abcdefghijklmnop was wrong; whsec_abcdefghijk too",
    }
    masked = mask_secrets(None, "info", event)
    assert masked["authorization"] == "***"
    assert masked["url"] == "postgresql://user:***@host/db"
    assert masked["queue"] == "cannot reach redis://host/0?password=***&db=1"
    assert masked["exception"] == "key bt_*** was wrong; whsec_*** too"


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
async def test_nul_never_breaks_a_query(client: httpx.AsyncClient) -> None:
    for path in ("/v1/files/a%00b", "/v1/models/a%00b", "/v1/files?after=%00"):
        answer = await client.get(path)
        assert answer.status_code == 400, path
        assert error_of(answer)["code"] == "invalid_value"
