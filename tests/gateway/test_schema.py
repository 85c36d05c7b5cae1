"""The OpenAPI document and the API agree, whatever is sent: real processes, Redis and SQLite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from schemathesis import checks

from tests.gateway.conftest import ADMIN_KEY
from tests.gateway.served import served

CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
    checks.allow_header_conformance,
    checks.unsupported_method,
]
Known = dict[str, list[str]]


@pytest.fixture
def url(settings: Any, tiny_model: Path, sqlite_template: Path) -> Iterator[str]:
    with served(settings, tiny_model) as (port, _):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def known(url: str, tenant: Any) -> Known:
    """Ids that exist, by the name of the path's parameter."""
    with httpx.Client(base_url=url, headers=tenant.headers) as http:
        body = {"model": "tiny", "prompt": "Hi", "max_tokens": 2}
        job = http.post("/v1/jobs", json={"endpoint": "/v1/completions", "body": body}).json()
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
        batch = http.post(
            "/v1/batches",
            json={"endpoint": "/v1/completions", "completion_window": "24h", "requests": [line]},
        ).json()
        endpoint = http.post(
            "/v1/webhook_endpoints", json={"url": "https://example.com/h", "events": ["*"]}
        ).json()
    return {
        "job_id": [job["id"]],
        "batch_id": [batch["id"]],
        "file_id": [batch["input_file_id"]],
        "model": ["tiny"],
        "tenant": [tenant.tenant_id],
        "key_id": ["key_0"],
        "webhook_endpoint_id": [endpoint.get("id", "we_0")],
    }


def explore(url: str, key: str, known: Known, examples: int) -> int:
    """Every operation, those below `/v1/admin` for the operator. Returns how many there are."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    wrong = []
    for operation in operations:
        secret = ADMIN_KEY if operation.path.startswith("/v1/admin") else key
        agrees = agreement(url, {"Authorization": f"Bearer {secret}"}, known, operation, examples)
        try:
            agrees()
        except Exception as error:  # all that is wrong, at once
            error.add_note(f"{operation.method} {operation.path}")
            wrong.append(error)
    if wrong:
        raise ExceptionGroup("the API and its document differ", wrong)
    return len(operations)


def agreement(
    url: str, headers: dict[str, str], known: Known, operation: Any, examples: int
) -> Callable[[], None]:
    @hypothesis.settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(), data=st.data())
    def agrees(case: Any, data: Any) -> None:
        for name, ids in known.items():
            if name in (case.path_parameters or {}) and data.draw(st.booleans()):
                case.path_parameters[name] = data.draw(st.sampled_from(ids))
        case.call_and_validate(base_url=url, headers=headers, checks=CHECKS, timeout=30)

    return agrees


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_the_api_keeps_to_its_document(url: str, tenant: Any, known: Known) -> None:
    assert explore(url, tenant.secret, known, examples=4) > 70


@pytest.mark.full
@pytest.mark.parametrize("database_url", ["sqlite", "postgres"], indirect=True)
def test_the_api_keeps_to_its_document_at_length(url: str, tenant: Any, known: Known) -> None:
    assert explore(url, tenant.secret, known, examples=60) > 70
