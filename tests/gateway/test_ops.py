from __future__ import annotations

from typing import Any

import httpx
import pytest

from worker.protocol.types import Capacity, WorkerLimits
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
