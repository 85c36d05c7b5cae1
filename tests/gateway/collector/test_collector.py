"""Exactly once, whatever is lost, repeated or late."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import msgspec
import pytest
from redis.asyncio import Redis
from sqlalchemy import func, select, update
from sqlalchemy.exc import OperationalError

from gateway.collector.backlog import waiting
from gateway.collector.fold import Fold
from gateway.collector.run import Collector, Pace
from gateway.collector.upkeep import record_announcements, requeue_unknown
from gateway.jobs.locking import Locked, lock
from gateway.models import BaseModel, Request, Result, UsageRecord
from worker.protocol.messages import Finished, LeaseLost, Started
from worker.protocol.types import Capacity, Choice, TokenLogprob, TokenUsage, WorkerLimits
from worker.queue.base import QueueUnavailable, StreamEntry, WorkerInfo

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
JOB = {"endpoint": "/v1/chat/completions", "body": BODY}


async def submit(client: httpx.AsyncClient, **changed: Any) -> str:
    answer = await client.post("/v1/jobs", json={**JOB, **changed})
    assert answer.status_code == 202, answer.text
    job_id: str = answer.json()["id"]
    return job_id


async def row(deployment: Any, request_id: str) -> Request:
    async with deployment.context.database.read() as session:
        found: Request = await session.get_one(Request, request_id)
    return found


async def count(deployment: Any, table: Any) -> int:
    async with deployment.context.database.read() as session:
        return await session.scalar(select(func.count()).select_from(table)) or 0


def entry(message: Any, number: int = 1) -> StreamEntry:
    return StreamEntry(f"{number}-0", message)


async def lose(deployment: Any, request_id: str, alone: bool = False) -> None:
    """The reaper found its lease expired."""
    attempt = (await row(deployment, request_id)).attempt
    await deployment.fold.commit([LeaseLost(request_id, attempt, "worker-1", alone)])


async def test_started_moves_a_request_on_and_never_back(
    client: httpx.AsyncClient, deployment: Any
) -> None:
    job = await submit(client)
    [lease] = await deployment.claim()
    started = Started(job, 1, "worker-1")
    await deployment.queue.emit(lease, started)
    await deployment.collect()
    assert (await client.get(f"/v1/jobs/{job}")).json()["status"] == "running"
    await deployment.answer(lease)
    await deployment.collect()
    await deployment.fold.commit([started])
    assert (await row(deployment, job)).state == "completed"


async def test_a_crash_between_commit_and_acknowledgement_changes_nothing(
    client: httpx.AsyncClient, deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await submit(client)
    [lease] = await deployment.claim()
    await deployment.answer(lease)
    [read] = await deployment.stream.read("first-collector", 10, 0.1)
    await deployment.fold.commit([read.event])  # and then the collector dies
    assert await deployment.stream.pending() == 1
    [again] = await deployment.stream.read("first-collector", 10, 0.1) or [read]
    assert await deployment.fold.take([again]) is False
    assert await deployment.stream.pending() == 0
    assert await deployment.queue.known([job]) == [False]
    assert await count(deployment, UsageRecord) == await count(deployment, Result) == 1


async def test_repeated_late_and_superseded_events_count_once(
    client: httpx.AsyncClient, deployment: Any
) -> None:
    job = await submit(client)
    [lease] = await deployment.claim()
    await lose(deployment, job)
    assert await deployment.dispatch() == 1
    [second] = await deployment.claim()
    assert second.request.attempt == 2
    assert second.request.suspects == job
    assert second.request.sampling.seed == lease.request.sampling.seed
    await deployment.answer(second, "truth")
    [read] = await deployment.stream.read("c", 10, 0.1)
    zombie = msgspec.structs.replace(read.event, attempt=1)
    assert isinstance(zombie, Finished)
    await deployment.fold.commit([zombie])
    assert (await row(deployment, job)).state == "dispatched"
    await deployment.fold.commit([read.event, zombie, read.event])
    await deployment.fold.commit([read.event])
    assert (await row(deployment, job)).state == "completed"
    assert await count(deployment, UsageRecord) == await count(deployment, Result) == 1


async def test_a_worker_s_death_halves_what_it_held(
    client: httpx.AsyncClient, deployment: Any
) -> None:
    jobs = [await submit(client) for _ in range(5)]
    leases = await deployment.claim()
    await deployment.fold.commit(
        [LeaseLost(lease.request.request_id, 1, "worker-1") for lease in leases]
    )
    assert await deployment.dispatch() == 5
    halves = [await deployment.claim(worker=name) for name in ("w2", "w3")]
    assert [len(half) for half in halves] == [3, 2]
    assert [{lease.request.suspects for lease in half} for half in halves] == [
        {(await row(deployment, jobs[0])).suspects},
        {(await row(deployment, jobs[-1])).suspects},
    ]
    assert await deployment.claim(worker="w4") == []


async def test_only_crashes_while_alone_exhaust_a_request(
    client: httpx.AsyncClient, deployment: Any
) -> None:
    job = await submit(client)
    seen = []
    for alone in (False, False, False, True, True, True):
        await deployment.dispatch()
        [lease] = await deployment.claim()
        seen.append(lease.request.suspects)
        await lose(deployment, job, alone)
    assert seen == ["", *[job] * 5]
    shown = (await client.get(f"/v1/jobs/{job}")).json()
    assert shown["status"] == "failed"
    assert shown["response"]["status_code"] == 500
    assert shown["response"]["body"]["error"]["code"] == "attempts_exhausted"
    assert await count(deployment, UsageRecord) == 0


async def test_a_retryable_failure_is_retried_a_bounded_number_of_times(
    client: httpx.AsyncClient, deployment: Any
) -> None:
    job = await submit(client)
    attempts = 0
    while (await row(deployment, job)).state != "failed":
        await deployment.dispatch()
        for lease in await deployment.claim():
            attempts += 1
            await deployment.fail(lease, "adapter_unavailable", retryable=True)
        await deployment.collect()
    assert attempts == 3
    response = (await client.get(f"/v1/jobs/{job}")).json()["response"]
    assert response["status_code"] == 404
    assert response["body"]["error"]["code"] == "adapter_unavailable"


async def test_attempts_that_never_ran_leave_the_retries_of_a_failure(
    client: httpx.AsyncClient, deployment: Any
) -> None:
    job = await submit(client)
    for _ in range(4):  # dispatched, and then lost with Redis
        await deployment.queue.forget([job])
        assert await requeue_unknown(deployment.context, "tiny", grace_ms=0) == 1
        await deployment.dispatch()
    [lease] = await deployment.claim()
    assert lease.request.attempt == 5
    await deployment.fail(lease, "adapter_unavailable", retryable=True)
    await deployment.collect()
    assert (await row(deployment, job)).state == "queued"


async def test_after_flushall_everything_still_ends_once(
    client: httpx.AsyncClient, deployment: Any, redis_url: str
) -> None:
    jobs = [await submit(client) for _ in range(4)]
    finished, held, *_ = await deployment.claim(3)
    await deployment.answer(finished)
    await deployment.collect()
    await deployment.epochs.check("c")
    async with Redis.from_url(redis_url) as server:
        await server.flushall()
    assert not await deployment.answer(held, "from before the flood")
    assert await deployment.epochs.check("c") == 3
    assert await deployment.epochs.check("c") == 0
    assert await deployment.work() == 3
    statuses = {(await row(deployment, job)).state for job in jobs}
    assert statuses == {"completed"}
    assert await count(deployment, UsageRecord) == 4


async def test_a_lost_enqueue_is_found_and_repeated(
    client: httpx.AsyncClient, deployment: Any
) -> None:
    job = await submit(client)
    await deployment.queue.forget([job])
    other = await submit(client)
    assert await requeue_unknown(deployment.context, "tiny") == 0  # too new to be lost
    assert await requeue_unknown(deployment.context, "tiny", grace_ms=0) == 1
    assert (await row(deployment, job)).state == "queued"
    assert (await row(deployment, other)).state == "dispatched"
    assert await deployment.work() == 2


async def test_waiting_names_the_tenants_and_classes_that_have_queued_rows(
    client: httpx.AsyncClient, other_client: httpx.AsyncClient, deployment: Any
) -> None:
    mine = [await submit(client, priority=name) for name in ("batch", "standard", "batch")]
    [theirs, running] = [await submit(other_client), await submit(other_client)]
    async with deployment.context.database.write() as session:
        queued = update(Request).where(Request.id.in_([*mine, theirs]))
        await session.execute(queued.values(state="queued"))
    tenants = [(await row(deployment, job)).tenant_id for job in (mine[0], theirs)]
    standard = (await row(deployment, running)).request_class
    async with deployment.context.database.read() as session:
        shares = await waiting(session, "tiny")
        assert await waiting(session, "another") == []
    assert sorted(shares) == sorted(
        [(tenants[0], "standard"), (tenants[0], "batch"), (tenants[1], standard)]
    )


async def test_a_full_redis_delays_what_was_accepted_and_loses_nothing(
    client: httpx.AsyncClient, deployment: Any, redis_url: str
) -> None:
    async with Redis.from_url(redis_url) as server:
        await server.config_set("maxmemory", "1")
        try:
            job = await submit(client)
            assert (await client.get(f"/v1/jobs/{job}")).json()["status"] == "queued"
            with pytest.raises(QueueUnavailable, match="out of memory"):
                await deployment.dispatch()
        finally:
            await server.config_set("maxmemory", "0")
    await deployment.dispatch()
    assert await deployment.work() == 1
    assert (await client.get(f"/v1/jobs/{job}")).json()["status"] == "completed"
    assert await count(deployment, UsageRecord) == 1


async def test_the_window_bounds_what_a_tenant_has_in_the_queue(
    client: httpx.AsyncClient,
    other_client: httpx.AsyncClient,
    deployment: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs = [await submit(client) for _ in range(5)]
    async with deployment.context.database.write() as session:
        await session.execute(update(Request).values(state="queued"))
    await deployment.queue.forget(jobs)
    monkeypatch.setitem(deployment.context.settings.__dict__, "queue_window", 2)
    assert await deployment.dispatch() == 2
    assert await deployment.dispatch() == 0
    await submit(other_client)
    leases = await deployment.claim()
    assert len(leases) == 3
    assert [lease.request.request_id for lease in leases if lease.request.request_id in jobs] == (
        jobs[:2]
    )


async def test_announced_limits_are_kept_and_used_at_submission(
    client: httpx.AsyncClient, deployment: Any
) -> None:
    free = Capacity(kv_tokens=1, adapter_rank=1, requests=1)
    for worker, kv_tokens in (("small", 40), ("large", 200)):
        limits = WorkerLimits(context_tokens=150, kv_tokens=kv_tokens, adapter_rank=8)
        await deployment.context.queues.directory.announce(WorkerInfo(worker, "tiny", limits, free))
    await record_announcements(deployment.context)
    async with deployment.context.database.read() as session:
        base = await session.get_one(BaseModel, "tiny")
    assert base.limits == {"context_tokens": 150, "kv_tokens": 200, "adapter_rank": 8}
    too_long = await client.post("/v1/jobs", json={**JOB, "body": {**BODY, "max_tokens": 140}})
    assert too_long.json()["error"]["code"] == "context_length_exceeded"
    too_many = {**BODY, "max_tokens": 100, "n": 2}
    too_big = await client.post("/v1/jobs", json={**JOB, "body": too_many})
    assert too_big.json()["error"]["code"] == "capacity_exceeded"
    assert too_big.json()["error"]["param"] == "n"
    default = {name: value for name, value in BODY.items() if name != "max_tokens"}
    job = await submit(client, body=default)
    assert (await row(deployment, job)).max_tokens == 150 - 20


async def test_two_collectors_that_fold_the_same_events_count_once(
    client: httpx.AsyncClient, deployment: Any
) -> None:
    jobs = [await submit(client) for _ in range(20)]
    for lease in await deployment.claim():
        await deployment.answer(lease)
    events = [read.event for read in await deployment.stream.read("c", 100, 0.1)]
    other = Fold(deployment.context, "tiny", deployment.prompts, deployment.tasks)
    await asyncio.gather(
        deployment.fold.commit(events),
        other.commit(events[::-1]),
        deployment.fold.commit(events[5:]),
    )
    assert {(await row(deployment, job)).state for job in jobs} == {"completed"}
    assert await count(deployment, UsageRecord) == await count(deployment, Result) == 20


async def test_an_answer_that_cannot_be_recorded_fails_alone(
    client: httpx.AsyncClient, deployment: Any
) -> None:
    poison = await submit(client, body={**BODY, "logprobs": True})
    healthy = await submit(client)
    for lease in await deployment.claim():
        request = lease.request
        strange = (TokenLogprob(-7, -0.5),) if request.request_id == poison else None
        choices = (Choice(0, "a", (1,), "stop", strange),)
        usage = TokenUsage(len(request.prompt_ids), 0, 1)
        await deployment.queue.finish(
            lease, Finished(request.request_id, request.attempt, choices, usage, "w")
        )
    await deployment.collect()
    assert (await row(deployment, healthy)).state == "completed"
    shown = (await client.get(f"/v1/jobs/{poison}")).json()
    assert shown["response"]["body"]["error"]["code"] == "internal_error"
    assert await count(deployment, UsageRecord) == 1


async def test_events_that_are_not_understood_are_passed_over(
    client: httpx.AsyncClient, deployment: Any
) -> None:
    assert await deployment.fold.take([entry(None)]) is False
    unknown = Started("job_unknown", 1, "worker-1")
    assert await deployment.fold.take([entry(unknown)]) is False


async def test_a_collector_process_works_through_outages_and_stops_when_told(
    client: httpx.AsyncClient, deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = asyncio.Event()
    pace = Pace(read=0.05, dispatch=0.05, models=0.05, announcements=0.05)
    running = asyncio.create_task(Collector(deployment.context, deployment.tasks, pace).run(stop))
    first = await submit(client)
    [lease] = await deployment.claim()

    outages = 2

    async def refuse_twice(*arguments: Any) -> Locked:
        nonlocal outages
        if outages:
            outages -= 1
            raise OperationalError("BEGIN", {}, Exception("the database is away"))
        return await lock(*arguments)

    monkeypatch.setattr("gateway.collector.fold.lock", refuse_twice)
    await deployment.answer(lease)
    poll = await client.get(f"/v1/jobs/{first}?wait=20")
    assert poll.json()["status"] == "completed"
    assert outages == 0
    assert await count(deployment, UsageRecord) == 1

    second = await submit(client)
    waiting = asyncio.create_task(client.get(f"/v1/jobs/{second}?wait=20"))
    for lease in await deployment.claim():
        await deployment.answer(lease)
    assert (await waiting).json()["status"] == "completed"
    stop.set()
    began = time.monotonic()
    await asyncio.wait_for(running, 10)
    assert time.monotonic() - began < 3
