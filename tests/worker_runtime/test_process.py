"""`python -m worker` as a process, with the null engine and a real Redis."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from worker.protocol.messages import (
    Failed,
    Finished,
    GenerateRequest,
    GenerationEvent,
    Started,
)
from worker.protocol.types import SamplingParams
from worker.queue.redis import RedisEventStream, RedisQueue, connect
from worker.queue.settings import QueueSettings
from worker.runtime.offline import OfflineEngine, Prompt
from worker.settings import EngineSettings

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that the null engine can serve."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    vocabulary = {f"w{number}": number for number in range(50)}
    Tokenizer(WordLevel(vocabulary, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def begin(*options: str, cwd: Path | None = None, **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "worker", *options],
            cwd=cwd,
            env={**os.environ, "BATTEN_DATA": str(tmp_path / "data"), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def refused(process: subprocess.Popen[str]) -> str:
    """What a worker that cannot start says: one line, and status 1."""
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    (line,) = output.strip().splitlines()
    return line


async def answer(url: str, model: str, request: GenerateRequest) -> Finished:
    """Enqueue it on an empty Redis, and wait for its result."""
    client = connect(url)
    await client.flushall()
    try:
        await RedisQueue(client, model).enqueue([request])
        events = RedisEventStream(client, model)
        async with asyncio.timeout(90):
            while True:
                for entry in await events.read("c", 10, 5.0):
                    assert not isinstance(entry.event, Failed), entry.event
                    if isinstance(entry.event, Finished):
                        return entry.event
    finally:
        await client.aclose()


def test_serves_until_it_is_told_to_stop(
    start: Start, model: Path, redis_server_url: str, make_request
) -> None:
    process = start("--engine", "null", "--model", str(model), REDIS_URL=redis_server_url)
    asyncio.run(answer(redis_server_url, "tiny", make_request(model="tiny")))
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output
    names = [json.loads(line)["event"] for line in output.splitlines()]
    assert names[0] == "worker_ready"
    assert names[-1] == "worker_stopped"


REAL = ("--dtype", "float32", "--kv-memory", "8MiB", "--threads", "1")


def small_llama() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def test_a_real_model_answers_as_its_own_library_does(
    start: Start, model: Path, redis_server_url: str, make_request
) -> None:
    import torch

    reference = small_llama()
    reference.save_pretrained(model)
    prompt = (5, 7, 11, 13)
    with torch.inference_mode():
        wanted = reference.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
    start("--model", str(model), *REAL, REDIS_URL=redis_server_url)
    sampling = SamplingParams(max_tokens=12, temperature=0)
    request = make_request(model="tiny", prompt_ids=prompt, sampling=sampling)
    (choice,) = asyncio.run(answer(redis_server_url, "tiny", request)).choices
    assert choice.token_ids == tuple(wanted[0, len(prompt) :].tolist())


def test_a_worker_killed_amid_its_answers_changes_none_of_them(
    start: Start, model: Path, redis_server_url: str, make_request
) -> None:
    """Sampled, with penalties and several choices, alone or together, here or by the next one
    (which has too little memory for all of them)."""
    small_llama().save_pretrained(model)
    requests = [
        make_request(
            f"r{seed}",
            model="tiny",
            prompt_ids=(5, 7, 11 + seed),
            stream=True,
            sampling=SamplingParams(
                max_tokens=300,
                seed=seed,
                n=1 + seed % 2,
                temperature=1.0,
                presence_penalty=0.4,
                frequency_penalty=0.2,
                repetition_penalty=1.1,
                logit_bias=((3, 1.5),),
            ),
        )
        for seed in range(4)
    ]
    options = ("--model", str(model), *REAL, "--lease-seconds", "3")

    def worker(memory: str) -> subprocess.Popen[str]:
        return start(*options, "--kv-memory", memory, REDIS_URL=redis_server_url)

    answers = asyncio.run(survive(redis_server_url, requests, worker))
    with OfflineEngine(
        EngineSettings(model=str(model), dtype="float32", kv_memory=8 << 20, threads=1)
    ) as engine:
        for request in requests:
            (alone,) = engine.generate([Prompt(request.prompt_ids, request.sampling)])
            assert answers[request.request_id].choices == alone.choices
            assert answers[request.request_id].attempt == 2


async def survive(
    url: str, requests: list[GenerateRequest], start: Callable[[str], subprocess.Popen[str]]
) -> dict[str, Finished]:
    """The answers, of which a first worker had begun all when it was killed."""
    client = connect(url)
    await client.flushall()
    settings = QueueSettings.with_lease(3.0)
    queue, events = RedisQueue(client, "tiny", settings), RedisEventStream(client, "tiny")
    seen: list[GenerationEvent] = []

    async def read() -> None:
        entries = await events.read("c", 100, 0.2)
        await events.ack([entry.entry_id for entry in entries])
        seen.extend(entry.event for entry in entries if entry.event)

    try:
        async with asyncio.timeout(120):
            await queue.enqueue(requests)
            first = start("8MiB")
            while sum(isinstance(event, Started) for event in seen) < len(requests):
                await read()
            first.kill()
            assert not any(isinstance(event, Finished) for event in seen)
            start("256KiB")
            while len(done := [e for e in seen if isinstance(e, Finished)]) < len(requests):
                lost = await queue.reap()
                again = [r for r in requests if r.request_id in lost]
                await queue.enqueue([msgspec.structs.replace(r, attempt=2) for r in again])
                await read()
                assert not any(isinstance(event, Failed) for event in seen), seen
        return {event.request_id: event for event in done}
    finally:
        await queue.close()
        await client.aclose()


def test_a_folder_that_does_not_exist(start: Start, redis_server_url: str) -> None:
    line = refused(start("--model", "/no/such/model", REDIS_URL=redis_server_url))
    assert line.startswith("Error: no such folder: /no/such/model; --model (BATTEN_MODEL) must")


def test_a_folder_without_a_model(start: Start, redis_server_url: str, tmp_path: Path) -> None:
    line = refused(start("--model", str(tmp_path), REDIS_URL=redis_server_url))
    assert "holds no config.json" in line


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"max_position_embeddings": 512}, "cannot be loaded"),
        (
            {"model_type": "mamba", "max_position_embeddings": 512, "vocab_size": 64},
            "unsupported_architecture",
        ),
    ],
    ids=["no-type", "mamba"],
)
def test_a_model_that_it_does_not_run(
    start: Start, redis_server_url: str, model: Path, config: dict, says: str
) -> None:
    (model / "config.json").write_text(json.dumps(config))
    assert says in refused(start("--model", str(model), REDIS_URL=redis_server_url))


def test_redis_that_does_not_answer(start: Start, model: Path) -> None:
    line = refused(start("--model", str(model), REDIS_URL="redis://127.0.0.1:1/0"))
    assert "127.0.0.1:1" in line
    assert "REDIS_URL" in line


def test_another_package_named_kernels(
    start: Start, model: Path, redis_server_url: str, tmp_path: Path
) -> None:
    (tmp_path / "kernels.py").touch()
    process = start("--model", str(model), REDIS_URL=redis_server_url, cwd=tmp_path)
    assert "another package of that name" in refused(process)


@pytest.mark.parametrize("missing", ["model", "redis"])
def test_what_has_no_default_is_asked_for(start: Start, missing: str, model: Path) -> None:
    given = {"model": ["--redis", "redis://127.0.0.1/0"], "redis": ["--model", str(model)]}
    process = start(*given[missing], REDIS_URL="", BATTEN_MODEL="")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"no {'queue' if missing == 'redis' else 'model'}: give --{missing}" in output
