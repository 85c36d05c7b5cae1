"""Poison among many: how many workers it kills, and what becomes of its neighbours."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.collector.effects import effects_of
from gateway.collector.suspects import halved
from gateway.jobs.locking import Standing
from gateway.jobs.settlement import Settlement
from worker.protocol.messages import Finished, GenerateRequest
from worker.protocol.types import Capacity, RequestId, SamplingParams, TenantId, TokenUsage
from worker.queue.memory import MemoryEventStream, MemoryQueue, MemoryServer

MAX_ATTEMPTS = 3
PLACES = 64


def standing(number: int) -> Standing:
    return Standing(
        id=f"r{number:03}",
        tenant_id=f"tenant_{number % 3}",
        key_id="key",
        batch_id=None,
        endpoint="/v1/completions",
        model="m",
        base_model="m",
        adapter_revision_id=None,
        request_class="batch",
        state="queued",
        attempt=0,
        failures=0,
        crashes=0,
        crashes_alone=0,
        suspects=None,
        prompt_tokens=1,
        max_tokens=1,
        kind="line",
        reserved_nano=0,
        price_id="price",
        webhook_endpoint_id=None,
        webhook_url=None,
        created_at=0,
        started_at=None,
        cancel_requested_at=None,
    )


@dataclass
class Fleet:
    """Workers of one model that die when they hold poison for a while, on a queue in memory."""

    poison: frozenset[str]
    workers: int
    rows: Mapping[str, Standing]
    time: float = 0.0
    deaths: int = 0
    ended: dict[str, Settlement] = field(default_factory=dict)

    def __post_init__(self) -> None:
        server = MemoryServer(clock=lambda: self.time)
        self.queue = MemoryQueue(server, "m")
        self.events = MemoryEventStream(server, "m")

    async def run(self) -> None:
        turns = 0
        while len(self.ended) < len(self.rows):
            turns += 1
            assert turns < 1_000, "it does not end"
            await self.dispatch()
            for worker in range(self.workers):
                await self.work(f"w{worker}-{turns}")
            self.time += 61
            await self.queue.reap()
            await self.fold()

    async def dispatch(self) -> None:
        for row in self.rows.values():
            if row.state == "queued" and row.id not in self.ended:
                row.attempt, row.state = row.attempt + 1, "dispatched"
                request = GenerateRequest(
                    request_id=RequestId(row.id),
                    attempt=row.attempt,
                    epoch="e",
                    tenant=TenantId(row.tenant_id),
                    model="m",
                    prompt_ids=(1,),
                    sampling=SamplingParams(max_tokens=1),
                    suspects=row.suspects or "",
                )
                await self.queue.enqueue([request])

    async def work(self, name: str) -> None:
        room = Capacity(kv_tokens=10**6, adapter_rank=0, requests=PLACES)
        leases = await self.queue.claim(name, room)
        if self.poison.intersection(lease.request.request_id for lease in leases):
            self.deaths += 1
            return
        for lease in leases:
            usage, request = TokenUsage(1, 0, 1), lease.request
            done = Finished(request.request_id, request.attempt, (), usage, name)
            assert await self.queue.finish(lease, done)

    async def fold(self) -> None:
        entries = await self.events.read("c", 1_000, 0)
        events = [entry.event for entry in entries if entry.event is not None]
        effects = effects_of(self.rows, events, MAX_ATTEMPTS, lambda *_: Settlement("completed"))
        self.ended |= effects.settlements
        for request_id in effects.settlements:
            self.rows[request_id].state = "completed"
        await self.events.ack([entry.entry_id for entry in entries])


def depth(number: int) -> int:
    return math.ceil(math.log2(number)) if number > 1 else 0


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 100), st.integers(1, 3))
def test_poison_is_found_in_few_deaths_and_its_neighbours_are_answered(
    data: st.DataObject, number: int, workers: int
) -> None:
    rows = {row.id: row for row in map(standing, range(number))}
    poison = data.draw(st.frozensets(st.sampled_from(sorted(rows)), max_size=2))
    fleet = Fleet(poison, workers, rows)
    asyncio.run(fleet.run())
    together = min(number, PLACES)
    assert fleet.deaths <= len(poison) * (1 + depth(together) + MAX_ATTEMPTS)
    for request_id, settlement in fleet.ended.items():
        row = rows[request_id]
        if request_id in poison:
            assert settlement.state == "failed"
            assert settlement.body is not None
            assert settlement.body["error"]["code"] == "attempts_exhausted"
        else:
            assert settlement.state == "completed"
            assert row.crashes_alone == 0
            assert row.crashes <= len(poison) * (1 + depth(together))


@given(st.lists(st.text(), min_size=1, unique=True))
def test_each_half_is_smaller_and_one_by_itself_is_alone(lost: list[str]) -> None:
    groups = halved(lost)
    assert groups.keys() == set(lost)
    sizes = sorted(list(groups.values()).count(name) for name in set(groups.values()))
    assert sum(sizes) == len(lost)
    assert sizes[-1] - sizes[0] <= 1
    assert len(sizes) == min(2, len(lost))
    alone = [each for each, name in groups.items() if each == name]
    assert len(alone) == sizes.count(1)
