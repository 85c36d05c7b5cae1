"""The commands of the other guides, as they stand."""

from __future__ import annotations

import json
from typing import Any

from tests.docs.conftest import ADDRESS, MODEL, ROOT, Served, needs_model, snippets

pytestmark = needs_model


def answers(served: Served, guide: str) -> list[Any]:
    """What the guide's commands print, one JSON value each."""
    commands = "\n".join(snippets((ROOT / "docs" / guide).read_text(), "bash"))
    output = served.run("bash", "-euo", "pipefail", text=commands)
    found, decoder = [], json.JSONDecoder()
    while output := output.lstrip():
        value, end = decoder.raw_decode(output)
        found.append(value)
        output = output[end:]
    return found


def test_api(served: Served) -> None:
    (job,) = answers(served, "api.md")
    assert job["object"] == "job"
    assert job["model"] == MODEL.name


def test_billing(served: Served) -> None:
    first, price, storage, budget = answers(served, "billing.md")
    assert "*" in [each["model"] for each in first["data"]]
    assert price["model"] == "*"
    assert storage["object"] == "storage_price"
    assert budget["hard_nano"] == 10_000_000_000


def test_adapters(served: Served) -> None:
    adapter, revisions = answers(served, "adapters.md")
    assert adapter["name"] == "my-sql"
    assert revisions["data"][0]["number"] == 1
    path = f"http://{ADDRESS}/v1/adapters/my-sql"  # which other guides do not expect
    forget = f'curl -sf -X DELETE {path} -H "Authorization: Bearer $BATTEN_API_KEY"'
    served.run("bash", "-euo", "pipefail", text=forget)
