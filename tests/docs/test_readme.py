"""The README's snippets, run as they stand against the system that `make serve` starts."""

from __future__ import annotations

import json
import re
import sys

from tests.docs.conftest import MODEL, ROOT, Served, needs_model, snippets

README = (ROOT / "README.md").read_text()

pytestmark = needs_model


def test_curl(served: Served) -> None:
    output = served.run("bash", "-euo", "pipefail", text=snippets(README, "bash")[0])
    models, end = json.JSONDecoder().raw_decode(output)
    completion = json.loads(output[end:])
    assert {model["id"] for model in models["data"]} >= {MODEL.name, "triage"}
    assert completion["model"] == MODEL.name
    assert completion["choices"][0]["message"]["role"] == "assistant"
    assert completion["usage"]["completion_tokens"] <= 40


def test_openai_client_then_command_line(served: Served) -> None:
    """In the README's order: the second uses the file that the first writes."""
    (code,) = snippets(README, "python")
    models, _, output_file = served.run(sys.executable, "-", text=code).partition("\n")
    assert models == str([MODEL.name, "triage"])
    answer = json.loads(output_file)
    assert answer["custom_id"] == "ticket-1"
    assert answer["response"]["body"]["model"] == "triage"

    output = served.run("bash", "-euo", "pipefail", text=snippets(README, "bash")[1])
    answers = (served.folder / "answers.jsonl").read_text().splitlines()
    assert [json.loads(line)["custom_id"] for line in answers] == ["ticket-1"]
    assert output.startswith("my-triage@1\n")
    assert "Every token is accounted for once." in output


def test_instructions_are_those_of_the_training() -> None:
    (code,) = snippets(README, "python")
    words = "".join(re.findall(r'^    "([^"]+)"$', code, re.MULTILINE))
    training = (ROOT / "examples" / "tasks" / "triage.py").read_text()
    assert words
    assert words == "".join(re.findall(r'^    "([^"]+)"$', training, re.MULTILINE)[:4])


def test_the_printed_example(served: Served) -> None:
    command = (served.folder / "serve.log").read_text().partition("\ntry: ")[2]
    answer = json.loads(served.run("bash", "-euo", "pipefail", text=command))
    assert answer["model"] == "triage"
