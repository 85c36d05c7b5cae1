"""`batten up` with real processes: everything but the model, which the null engine replaces."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

from tests.processes import child_of

BOUND = 60.0


def wait_for(condition: Callable[[], object], what: str, bound: float = BOUND) -> None:
    deadline = time.monotonic() + bound
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Up:
    """One `batten up`."""

    def __init__(self, environment: dict[str, str], folder: Path, *args: str) -> None:
        self.data = Path(environment["BATTEN_DATA"])
        self._output = folder / f"up-{time.monotonic_ns()}.log"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gateway", "up", *args],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    def wait_for(self, text: str) -> None:
        wait_for(lambda: text in self.output or self.process.poll() is not None, text)
        assert text in self.output, self.output

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, words: str) -> psutil.Process | None:
        return child_of(self.process.pid, words)

    def kill_child(self, words: str) -> None:
        """SIGKILL it, and wait for its successor."""
        old = self.child(words)
        assert old is not None
        old.kill()
        wait_for(lambda: (new := self.child(words)) and new.pid != old.pid, f"a new {words}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the gateway can tokenise with and the null engine can serve."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    tokenizer = Tokenizer(WordLevel({f"w{n}": n for n in range(50)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def start(environment: dict[str, str], model: Path, tmp_path: Path) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def start(*args: str, **env: str) -> Up:
        variables = {**environment, "BATTEN_ENGINE": "null", "BATTEN_MODEL": str(model), **env}
        up = Up(variables, tmp_path, *args)
        started.append(up)
        return up

    yield start
    for up in started:
        family = [*up.family(), psutil.Process(up.process.pid)] if up.process.poll() is None else []
        for process in family:
            if alive(process):
                process.kill()
        up.process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_system_comes_up_works_heals_and_goes(start, batten, tmp_path: Path) -> None:
    port = free_port()
    up = start("--port", str(port))
    up.wait_for("is ready")
    url = f"http://127.0.0.1:{port}"
    assert ready(url)
    data = {"BATTEN_DATA": str(up.data)}
    again = batten("up", "--workers", "0", "--port", "0", **data)
    assert again.returncode == 1
    assert f"(pid {up.process.pid})" in again.stderr
    taken = batten(
        "up", "--workers", "0", "--port", str(port), "--data", str(tmp_path / "elsewhere")
    )
    assert taken.returncode == 1
    assert f"port {port} on 127.0.0.1 is taken" in taken.stderr
    assert not (tmp_path / "elsewhere" / "redis").exists()

    assert batten("tenant", "create", "acme", **data).returncode == 0
    key = batten("key", "create", "acme", **data).stdout.strip()
    run_batch(batten, url, key, tmp_path, "before")
    for child in (
        "-m worker",
        "gateway collector",
        "gateway control",
        "gateway api",
        "redis-server",
    ):
        up.kill_child(child)
    wait_for(lambda: ready(url), "the API to answer again")
    run_batch(batten, url, key, tmp_path, "after")

    family = up.family()
    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(BOUND) == 0, up.output
    wait_for(lambda: not any(map(alive, family)), "all processes to end")
    assert up.output.rstrip().endswith("stopped")


def ready(url: str) -> bool:
    """Whether the API, its database and Redis answer."""
    try:
        with urllib.request.urlopen(f"{url}/readyz") as response:
            return bool(json.load(response)["status"] == "ok")
    except OSError:
        return False


def run_batch(batten, url: str, key: str, folder: Path, name: str) -> None:
    path, output = folder / f"{name}.jsonl", folder / f"{name}.out.jsonl"
    body = {"model": "tiny", "prompt": "w1 w2 w3", "max_tokens": 5}
    with path.open("w") as file:
        for number in range(20):
            request = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions"}
            file.write(json.dumps({**request, "body": body}) + "\n")
    done = batten("batch", "run", str(path), "-o", str(output), "--url", url, BATTEN_API_KEY=key)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == [f"c{number}" for number in range(20)]
    assert {a["response"]["body"]["usage"]["completion_tokens"] for a in answers} == {5}


def test_nothing_survives_a_killed_supervisor(start) -> None:
    up = start("--port", "0")
    up.wait_for("is ready")
    wait_for(lambda: len(up.family()) >= 9, "Celery's pool and beat, too")
    family = up.family()
    up.process.kill()
    wait_for(lambda: not any(map(alive, family)), "all processes to end", 10)


@pytest.mark.parametrize("moment", ["preparing the database", "redis.log", "worker-1.log"])
def test_ctrl_c_while_it_starts_leaves_nothing(start, moment: str) -> None:
    up = start("--port", "0")
    log = up.data / "logs" / moment
    wait_for(lambda: moment in up.output or log.exists(), moment)
    family = up.family()
    os.killpg(up.process.pid, signal.SIGINT)
    assert up.process.wait(BOUND) in (0, 130)
    wait_for(lambda: not any(map(alive, family)), "all processes to end", 10)


def test_a_child_that_cannot_start_ends_it_with_the_reason(start, tmp_path: Path) -> None:
    up = start(
        "--port", "0", "--workers", "1", BATTEN_STORE=f"file://{tmp_path}/s", BATTEN_DTYPE="x"
    )
    assert up.process.wait(BOUND) == 1
    last = up.output.rstrip().splitlines()[-1]
    assert last.startswith("Error: worker-1 does not start: ")
    assert "worker-1.log" in up.output


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("/no/such/folder", "there is no folder /no/such/folder: --model"),
        ("", "no model: give --model"),
    ],
)
def test_a_wrong_model_is_said_before_anything_starts(start, model: str, says: str) -> None:
    up = start("--port", "0", BATTEN_MODEL=model)
    assert up.process.wait(BOUND) in (1, 2)
    assert says in up.output
    assert not (up.data / "logs").exists()


def hub_away(tmp_path: Path) -> dict[str, str]:
    """Environment of a process whose cache lies in `tmp_path`, and whose hub is not there."""
    return {"HF_ENDPOINT": "http://127.0.0.1:1", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}


def test_a_model_on_a_hub_that_is_away_is_given_up_at_once(start, tmp_path: Path) -> None:
    up = start("--port", "0", BATTEN_MODEL="org/name", **hub_away(tmp_path))
    assert up.process.wait(BOUND) == 1
    *_, last = up.output.rstrip().splitlines()
    assert last.startswith("Error: 'org/name' is no folder, is not in the local cache")
    assert "`hf download org/name`" in last
    assert "--model (BATTEN_MODEL)" in last
    assert "Retrying" not in up.output
    assert not (up.data / "logs").exists()


def test_a_model_in_the_cache_needs_no_hub(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--name"
    for path, text in (("refs/main", "c0ffee"), ("snapshots/c0ffee/config.json", '{"n": 1}')):
        (repository / path).parent.mkdir(parents=True)
        (repository / path).write_text(text)
    script = (
        "from gateway.adapters.base_models import read_config; print(read_config('org/name')['n'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **hub_away(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
