"""The snippets of docs/webhooks.md, in its order."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from standardwebhooks import Webhook

from gateway.webhooks.events import EVENT_TYPES
from gateway.webhooks.secrets import Secret
from gateway.webhooks.signing import signed_headers
from tests.docs.conftest import ADDRESS, MODEL, ROOT, Served, free_port, needs_model, snippets

GUIDE = (ROOT / "docs" / "webhooks.md").read_text()
RECEIVER = "127.0.0.1:9000"


@contextmanager
def running(served: Served, code: str, secret: str, log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", code.replace(ADDRESS, served.address)],
            env={**served.environment, "BATTEN_WEBHOOK_SECRET": secret},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def wait_for(holds: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


@needs_model
def test_register_receive_and_try(served: Served, tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "receiver.log"
    register, send = snippets(GUIDE, "bash")
    receiver = snippets(GUIDE, "python")[0].replace('("127.0.0.1", 9000)', f'("127.0.0.1", {port})')
    register = register.replace(RECEIVER, f"127.0.0.1:{port}")
    made = json.loads(served.run("bash", "-euo", "pipefail", text=register))
    ready = f'print("ready", flush=True)\n{receiver.splitlines()[-1]}'
    receiver = receiver.replace(receiver.splitlines()[-1], ready)
    with running(served, receiver, made["signing_secret"], log):
        wait_for(lambda: "ready" in log.read_text(), log)
        send = f"ENDPOINT={made['id']}\n{send}"
        output = served.run("bash", "-euo", "pipefail", text=send)
        sample, end = json.JSONDecoder().raw_decode(output)
        job = json.loads(output[end:])
        assert sample["status_code"] == 204
        assert job["model"] == MODEL.name
        wait_for(lambda: f"job.completed {job['id']}\n" in log.read_text(), log)
    assert "batch.completed batch_sample\n" in log.read_text()


def test_verifying_by_hand() -> None:
    names: dict[str, Callable[..., bool]] = {}
    exec(snippets(GUIDE, "python")[1], names)
    is_genuine = names["is_genuine"]
    old, new = Secret(b"o" * 32), Secret(b"n" * 32)
    now = int(time.time())
    headers = signed_headers("evt_1", b'{"a":1}', [new, old], now)
    for secret in (old, new):
        assert is_genuine(headers, b'{"a":1}', secret.text)
        Webhook(secret.text).verify(b'{"a":1}', headers)
    assert not is_genuine(headers, b'{"a":2}', new.text)
    assert not is_genuine(headers, b'{"a":1}', Secret(b"x" * 32).text)
    late = signed_headers("evt_1", b'{"a":1}', [new], now - 301)
    assert not is_genuine(late, b'{"a":1}', new.text)


def test_every_event_is_described() -> None:
    for name in EVENT_TYPES:
        assert f"`{name}`" in GUIDE, name
