from __future__ import annotations

from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from worker.protocol.messages import Finished
from worker.protocol.types import Capacity, Choice, ComputeTimes, TokenUsage, WorkerLimits
from worker.queue.base import WorkerInfo

LIMITS = WorkerLimits(context_tokens=1024, kv_tokens=100_000, adapter_rank=64)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_readiness_counts_the_workers_of_each_model(
    http: httpx.AsyncClient, deployment: Any
) -> None:
    ready = await http.get("/readyz")
    assert (ready.status_code, ready.json()["workers"]) == (200, {"tiny": 0})
    free = Capacity(kv_tokens=1, adapter_rank=1, requests=1)
    for name in ("w1", "w2"):
        info = WorkerInfo(name, "tiny", LIMITS, free)
        await deployment.context.queues.directory.announce(info)
    assert (await http.get("/readyz")).json()["workers"] == {"tiny": 2}


def value(text: str, name: str, **labels: str) -> float:
    [found] = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and sample.labels == labels
    ]
    return float(found)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_metrics_tell_latencies_tokens_and_queues(
    client: httpx.AsyncClient, http: httpx.AsyncClient, deployment: Any
) -> None:
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 9}
    asked = {"endpoint": "/v1/completions", "body": body}
    for _ in range(3):
        assert (await client.post("/v1/jobs", json=asked)).status_code == 202
    new, timed, waiting = await deployment.claim()
    request = timed.request
    choice = Choice(0, "hello", tuple(deployment.prompts.encode("hello")), "stop")
    usage = TokenUsage(2, 1, 5)
    times = ComputeTimes(prefill=0.02, decode=3600.0)
    finished = Finished(request.request_id, 1, (choice,), usage, "w", times)
    await deployment.queue.finish(timed, finished)
    await deployment.answer(new)  # as a worker of an older release: without times
    await deployment.collect()
    await deployment.collect()
    text = (await http.get("/metrics")).text

    def seconds(phase: str, of: str = "count", **more: str) -> float:
        labels = {"class": "standard", "phase": phase, **more}
        return value(text, f"batten_request_seconds_{of}", **labels)

    assert [seconds(phase) for phase in ("e2e", "queue", "prefill", "decode")] == [2, 1, 1, 1]
    assert seconds("prefill", "sum") == pytest.approx(0.02)
    assert seconds("prefill", "bucket", le="0.01") == 0
    assert seconds("prefill", "bucket", le="0.025") == seconds("prefill", "bucket", le="+Inf") == 1
    for kind, tokens in {"prompt": 4, "cached": 1, "completion": 10}.items():
        assert value(text, "batten_tokens_total", **{"class": "standard", "kind": kind}) == tokens
    for state, count in {"ready": 0, "leased": 1}.items():
        labels = {"model": "tiny", "class": "standard", "state": state}
        assert value(text, "batten_queue_requests", **labels) == count
    assert request.tenant not in text
    assert waiting.request.request_id not in text
