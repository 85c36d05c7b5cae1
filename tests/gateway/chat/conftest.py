"""The API on a socket, and a worker runtime whose engine has no model."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from openai import AsyncOpenAI
from tokenizers import Tokenizer

from worker.engine.config import SchedulerConfig
from worker.engine.engine import Engine
from worker.engine.null_runner import NullResidency, NullRunner
from worker.runtime.lifecycle import StopSwitch, serve
from worker.runtime.loops import Rhythm
from worker.runtime.worker import Worker

BOUND = 20.0


@pytest.fixture
async def api_url(app: FastAPI) -> AsyncIterator[str]:
    """Where the application listens: responses really stream."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    await asyncio.wait_for(serving, BOUND)
    listener.close()


@pytest.fixture
async def streaming_client(api_url: str, tenant: Any) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        api_key=tenant.secret, base_url=f"{api_url}/v1", max_retries=0, timeout=BOUND
    ) as client:
        yield client


@pytest.fixture
def step_seconds() -> float:
    return 0.0


@pytest.fixture
async def null_worker(deployment: Any, tiny_model: Any, step_seconds: float) -> AsyncIterator[None]:
    """Answers with bytes chosen by hashing, and ends a choice after about 40 of them."""
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    eos = tokenizer.token_to_id("<eos>")
    runner = NullRunner(eos, eos_token_id=eos, mean_tokens=40, delay=step_seconds)
    config = SchedulerConfig(num_blocks=1024, context_tokens=1024)
    engine = Engine(config, runner, NullResidency(64), tokenizer, frozenset({eos}), "r")
    stop = StopSwitch()
    context = deployment.context
    worker = Worker("null-worker", engine, context.queues.queue("tiny"))
    rhythm = Rhythm(claim_idle=0.01, notice_wait=0.2)
    running = asyncio.create_task(
        serve(
            worker,
            context.queues.directory,
            context.queues.prefixes("tiny"),
            stop,
            rhythm=rhythm,
            drain_seconds=1.0,
        )
    )
    async with asyncio.timeout(BOUND):
        while not await context.queues.directory.workers():  # noqa: ASYNC110  announced over Redis
            await asyncio.sleep(0.005)
    ended = asyncio.Event()
    folding = asyncio.create_task(_collect(deployment, ended))
    yield
    ended.set()
    stop.press()
    stop.press()
    await asyncio.wait_for(running, BOUND)
    await asyncio.wait_for(folding, BOUND)


async def _collect(deployment: Any, ended: asyncio.Event) -> None:
    """As the collector: events into SQL, and into the queue what the fast path has left."""
    while not ended.is_set():
        await deployment.dispatch()
        await deployment.fold.step(deployment.consumer, 0.2)
