"""Tokenizer files beside an adapter: served, or refused by name; never ignored."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from safetensors.numpy import save
from tokenizers import Tokenizer

from gateway.adapters.base_models import register_base_model
from gateway.adapters.ingest import ingest
from gateway.adapters.prompt_files import PromptFormat, read_prompt_format
from gateway.kit import template_process
from gateway.kit.context import Context
from gateway.kit.template_child import Order, framed
from gateway.kit.template_process import TemplateProcess
from gateway.kit.templates import TemplateRefused
from worker.protocol.peft import Problem

CHAT = "/v1/chat/completions"
OWN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}[bot]"
MESSAGES = [{"role": "user", "content": "Hi"}]
WIDTH = 8


@pytest.fixture
def beside(tiny_model: Path, tmp_path: Path) -> Path:
    """Exactly the base model's tokenizer files."""
    folder = tmp_path / "beside"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(tiny_model / name, folder / name)
    return folder


def read(folder: Path, base: Path, most_chars: int = 1000) -> Any:
    return read_prompt_format(folder, base, most_chars)


def problem(outcome: Any) -> Problem:
    assert isinstance(outcome, list), outcome
    found: Problem = outcome[0]
    return found


def test_the_base_models_files_change_nothing(beside: Path, tiny_model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(beside / "tokenizer.json"))
    tokenizer.enable_truncation(99)
    tokenizer.enable_padding()
    tokenizer.save(str(beside / "tokenizer.json"), pretty=False)
    (beside / "special_tokens_map.json").write_text('{"pad_token": "[PAD]"}')
    assert read(beside, tiny_model) is None


def test_a_template_and_what_it_names_are_taken(beside: Path, tiny_model: Path) -> None:
    (beside / "chat_template.jinja").write_text(OWN)
    assert read(beside, tiny_model) == PromptFormat(OWN, {"eos_token": "<eos>"}, None)
    (beside / "chat_template.jinja").unlink()
    config = {"eos_token": "<eos>", "chat_template": [{"name": "default", "template": OWN}]}
    (beside / "tokenizer_config.json").write_text(json.dumps(config))
    assert read(beside, tiny_model) == PromptFormat(OWN, {"eos_token": "<eos>"}, None)


def test_another_end_of_sequence_ends_answers_too(beside: Path, tiny_model: Path) -> None:
    (beside / "tokenizer_config.json").write_text('{"eos_token": {"content": "!"}}')
    base = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    template = (tiny_model / "chat_template.jinja").read_text()
    assert read(beside, tiny_model) == PromptFormat(template, {}, base.token_to_id("!"))


def test_added_tokens_are_refused_by_name(beside: Path, tiny_model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(beside / "tokenizer.json"))
    tokenizer.add_special_tokens(["<tool>", "</tool>"])
    tokenizer.save(str(beside / "tokenizer.json"))
    said = problem(read(beside, tiny_model))
    assert (said.code, said.name) == ("adapter_added_tokens", "tokenizer.json")
    assert "'<tool>', '</tool>'" in said.message


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("added_tokens.json", '{"<tool>": 257}', "adapter_added_tokens"),
        ("tokenizer_config.json", '{"eos_token": "<|im_end|>"}', "adapter_added_tokens"),
        ("tokenizer_config.json", "{", "adapter_invalid_tokenizer"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}', "adapter_chat_template_invalid"),
        ("chat_template.jinja", "x" * 1001, "adapter_chat_template_invalid"),
        ("tokenizer.json", "{}", "adapter_invalid_tokenizer"),
    ],
)
def test_what_cannot_be_served_is_named(
    beside: Path, tiny_model: Path, name: str, content: str, code: str
) -> None:
    if "chat_template" in content:
        (beside / "chat_template.jinja").unlink()
    (beside / name).write_text(content)
    assert problem(read(beside, tiny_model)).code == code


def test_a_tokenizer_that_splits_otherwise_is_refused(beside: Path, tiny_model: Path) -> None:
    content = json.loads((beside / "tokenizer.json").read_text())
    content["pre_tokenizer"]["add_prefix_space"] = True
    (beside / "tokenizer.json").write_text(json.dumps(content))
    said = problem(read(beside, tiny_model))
    assert said.code == "adapter_tokenizer_differs"
    assert "pre_tokenizer" in said.message


def test_a_slow_tokenizer_must_be_the_bases_own_file(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    assert problem(read(tmp_path, tiny_model)).code == "adapter_tokenizer_differs"


@pytest.fixture
async def served(deployment: Any, tiny_model: Path, tmp_path: Path) -> str:
    """`tiny` with weights beside its tokenizer."""
    folder = tmp_path / "tiny-with-weights"
    shutil.copytree(tiny_model, folder)
    config = {"model_type": "llama", "max_position_embeddings": 1024}
    (folder / "config.json").write_text(json.dumps(config))
    weight = np.zeros((WIDTH, WIDTH), np.float32)
    tensors = {"model.layers.0.self_attn.q_proj.weight": weight}
    (folder / "model.safetensors").write_bytes(save(tensors))
    async with deployment.context.database.write() as session:
        await register_base_model(session, "tiny", str(folder))
    return "tiny"


async def upload(
    client: httpx.AsyncClient, context: Context, files: dict[str, bytes]
) -> dict[str, Any]:
    form = [("files", (name, content)) for name, content in files.items()]
    answer = await client.post("/v1/adapters", data={"name": "bot"}, files=form)
    assert answer.status_code == 201, answer.text
    await ingest(context, answer.json()["revision"]["id"])
    shown: dict[str, Any] = (await client.get("/v1/adapters/bot/revisions/1")).json()
    return shown


@pytest.mark.parametrize("redispatched", [False, True])
async def test_an_adapters_prompts_are_rendered_by_its_own_template(
    client: httpx.AsyncClient,
    deployment: Any,
    served: str,
    make_folder: Callable[..., dict[str, bytes]],
    redispatched: bool,
) -> None:
    """At submission, and when the dispatcher reads the body again."""
    config = b'{"eos_token": "!"}'
    files = {"chat_template.jinja": OWN.encode(), "tokenizer_config.json": config}
    shown = await upload(client, deployment.context, make_folder() | files)
    assert (shown["status"], shown["own_prompt_format"]) == ("ready", True), shown["errors"]
    bodies = [{"model": model, "messages": MESSAGES} for model in ("bot", "tiny")]
    for body in bodies:
        await client.post("/v1/jobs", json={"endpoint": CHAT, "body": body})
    if redispatched:
        leases = await deployment.claim()
        for lease in leases:
            await deployment.fail(lease, "adapter_unavailable", retryable=True)
        await deployment.collect()
        assert await deployment.dispatch() == 2
    requests = {
        lease.request.adapter is not None: lease.request for lease in await deployment.claim()
    }
    assert requests[True].prompt_ids == deployment.prompts.encode("<user>Hi![bot]")
    assert requests[False].prompt_ids == deployment.prompts.encode("user: Hi\nassistant: ")
    assert requests[True].sampling.stop_token_ids == deployment.prompts.encode("!")
    assert requests[False].sampling.stop_token_ids == ()


async def test_an_uploaded_tokenizer_with_more_tokens_is_rejected(
    client: httpx.AsyncClient,
    deployment: Any,
    served: str,
    beside: Path,
    make_folder: Callable[..., dict[str, bytes]],
) -> None:
    tokenizer = Tokenizer.from_file(str(beside / "tokenizer.json"))
    tokenizer.add_tokens(["hello"])
    files = {"tokenizer.json": tokenizer.to_str().encode()}
    shown = await upload(client, deployment.context, make_folder() | files)
    assert [error["code"] for error in shown["errors"]] == ["adapter_added_tokens"]


async def test_weights_that_would_be_ignored_are_refused(
    client: httpx.AsyncClient, deployment: Any, make_folder: Callable[..., dict[str, bytes]]
) -> None:
    files = make_folder() | {"new_embeddings.safetensors": b"x"}
    form = [("files", (name, content)) for name, content in files.items()]
    answer = await client.post("/v1/adapters", data={"name": "bot"}, files=form)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "adapter_unknown_file")
    assert "new_embeddings.safetensors" in answer.json()["error"]["message"]


@pytest.fixture
def process():
    process = TemplateProcess(seconds=0.5)
    yield process
    process.close()


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TWICE = "{% macro f(n) %}{{ f(n - 1) }}{{ f(n - 1) }}{% endmacro %}{{ f(400) }}"


@pytest.mark.parametrize("hostile", [ENDLESS, TWICE, "{{ 7 ** (7 ** (7 ** 7)) }}"])
def test_a_template_that_never_ends_is_ended(process: TemplateProcess, hostile: str) -> None:
    assert process.render("{{ messages[0].content }}", {}, MESSAGES) == "Hi"
    began = time.monotonic()
    with pytest.raises(TemplateRefused, match=r"longer than|too much"):
        process.render(hostile, {}, MESSAGES)
    assert time.monotonic() - began < 20
    assert process.render("{{ messages[0].content }}!", {}, MESSAGES) == "Hi!"


@pytest.mark.parametrize(
    "hostile",
    [
        "{{ 'a' * 10 ** 10 }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ 'a' | center(10 ** 8) }}",
        "{{ raise_exception('no') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_template_that_is_refused_leaves_the_process_as_it_was(
    process: TemplateProcess, hostile: str
) -> None:
    with pytest.raises(TemplateRefused):
        process.render(hostile, {}, MESSAGES)
    assert process.render("{{ messages[0].content }}", {}, MESSAGES) == "Hi"


def test_a_process_whose_parent_is_gone_ends_all_the_same() -> None:
    child = template_process._start(0.5)
    assert child.stdin is not None
    order = Order(ENDLESS, {}, [{"role": "user", "content": "Hi"}])
    child.stdin.write(framed(msgspec.msgpack.encode(order)))
    child.stdin.close()
    assert child.wait(120) == -signal.SIGXCPU
    assert child.stdout is not None
    child.stdout.close()


def test_the_process_knows_no_secrets(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATTEN_ADMIN_KEY", "secret")
    process.render("x", {}, MESSAGES)
    assert process._process is not None
    environment = Path(f"/proc/{process._process.pid}/environ").read_bytes()
    assert b"secret" not in environment


async def test_a_hostile_template_delays_nobody_else(
    client: httpx.AsyncClient,
    deployment: Any,
    served: str,
    make_folder: Callable[..., dict[str, bytes]],
) -> None:
    """The event loop goes on, and the tenant's answer is a 400 that says why."""
    files = {"chat_template.jinja": ENDLESS.encode()}
    assert (await upload(client, deployment.context, make_folder() | files))["status"] == "ready"
    body = {"model": "bot", "messages": MESSAGES}
    hostile = asyncio.create_task(client.post("/v1/jobs", json={"endpoint": CHAT, "body": body}))
    asked = 0
    while not hostile.done():
        assert (await client.get("/v1/models")).status_code == 200
        asked += 1
    assert asked > 3
    answer = hostile.result()
    assert answer.status_code == 400
    assert "it took longer than" in answer.json()["error"]["message"]
