"""Any history of calls, against a plain model, and the two queues against each other."""

import asyncio
import math
import time
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from worker.protocol.messages import Cancelled, Finished, GenerateRequest, LeaseLost, Started
from worker.protocol.types import AdapterRef, Capacity, SamplingParams, TokenUsage
from worker.queue.base import ClassDepth, Renewal
from worker.queue.settings import QueueSettings

TIGHT = QueueSettings(look_ahead=3, tenant_look_ahead=2, pass_over_limit=2, rebase_at=1_500)
STARTED_AT = time.time()
IDS = [f"r{i}" for i in range(6)]
CLASSES = ("interactive", "standard", "batch")
EMPTY_WORKER = Capacity(kv_tokens=10**6, adapter_rank=100, requests=50)

requests = st.builds(
    GenerateRequest,
    request_id=st.sampled_from(IDS),
    attempt=st.integers(1, 4),
    epoch=st.just("e"),
    tenant=st.sampled_from(["a", "b", "c"]),
    model=st.just("org/model"),
    prompt_ids=st.sampled_from([(1,) * 10, (1,) * 80, (2,) * 80, (1,) * 400]),
    sampling=st.builds(
        SamplingParams, max_tokens=st.sampled_from([5, 300]), n=st.sampled_from([1, 1, 3])
    ),
    request_class=st.sampled_from(CLASSES),
    adapter=st.sampled_from([None, None, AdapterRef("red", 8), AdapterRef("blue", 16)]),
    deadline=st.sampled_from([None, None, STARTED_AT + 450, STARTED_AT + 86_400]),
    weight=st.sampled_from([1.0, 3.0]),
    order=st.sampled_from([0.0, 0.0, 1.0, -1.0]),
    suspects=st.sampled_from(["", "", "", "one", "other", *IDS]),
    stream=st.booleans(),
)
capacities = st.builds(
    Capacity,
    kv_tokens=st.sampled_from([0, 100, 600, 5_000]),
    adapter_rank=st.sampled_from([0, 8, 24]),
    requests=st.integers(0, 4),
    running=st.integers(0, 2),
    resident=st.sampled_from([(), ("red",)]),
)


@dataclass
class Entry:
    request: GenerateRequest
    state: str = "ready"
    worker: str = ""
    leases: list = field(default_factory=list)
    expired: bool = False


class QueueMachine(RuleBasedStateMachine):
    """The model is a dict. Each step goes to every world, and all of them must agree."""

    def __init__(self, make_worlds):
        super().__init__()
        self.runner = asyncio.Runner()
        self.worlds = self.run(make_worlds())
        self.queues = [world.queue(TIGHT) for world in self.worlds]
        self.streams = [world.events(TIGHT) for world in self.worlds]
        self.entries: dict[str, Entry] = {}
        self.tombstones: set[str] = set()
        self.expected_events: list = []

    def run(self, coroutine):
        return self.runner.run(coroutine)

    def all(self, method, *arguments):
        """Every queue's answer to one call; they must be equal."""
        answers = [self.run(getattr(queue, method)(*arguments)) for queue in self.queues]
        assert all(answer == answers[0] for answer in answers), answers
        return answers[0]

    def each(self, method, entry, *arguments):
        """One call about a lease: every queue gets its own one."""
        calls = zip(self.queues, entry.leases, strict=True)
        answers = {self.run(getattr(queue, method)(lease, *arguments)) for queue, lease in calls}
        assert len(answers) == 1
        return answers.pop()

    def cancelled(self, entry):
        request = entry.request
        self.expected_events.append(
            Cancelled(request_id=request.request_id, attempt=request.attempt)
        )
        entry.state = "finished"

    @rule(request=requests)
    def enqueue(self, request):
        (outcome,) = self.all("enqueue", [request])
        old = self.entries.get(request.request_id)
        if old and old.request.attempt >= request.attempt:
            assert outcome == "duplicate"
        elif request.request_id in self.tombstones:
            assert outcome == "cancelled"
        else:
            assert outcome == "enqueued"
            self.entries[request.request_id] = Entry(request)

    @rule(worker=st.sampled_from(["w1", "w2"]), capacity=capacities)
    def claim(self, worker, capacity):
        answers = [self.run(queue.claim(worker, capacity)) for queue in self.queues]
        leases = answers[0]
        for other in answers[1:]:
            told = [(lease.request, lease.predicted_tokens) for lease in other]
            assert told == [(lease.request, lease.predicted_tokens) for lease in leases]
        for together in zip(*answers, strict=True):
            entry = self.entries[together[0].request.request_id]
            assert entry.state == "ready"
            assert together[0].request == entry.request
            assert len({lease.token for lease in together}) == len(together)
            entry.state, entry.worker, entry.leases = "leased", worker, list(together)
            entry.expired = False
        self.check_fit(capacity, leases)

    def check_fit(self, capacity, leases):
        taken = [lease.request for lease in leases]
        tokens = [
            len(one.request.prompt_ids) + one.request.sampling.n * one.predicted_tokens
            for one in leases
        ]
        begun_alone = len(taken) == 1 and capacity.running == 0
        assert len(taken) <= capacity.requests
        assert sum(tokens) <= capacity.kv_tokens or begun_alone
        adapters = {one.adapter for one in taken if one.adapter} - {AdapterRef("red", 8)}
        if "red" not in capacity.resident:
            adapters |= {one.adapter for one in taken if one.adapter == AdapterRef("red", 8)}
        assert sum(adapter.rank for adapter in adapters) <= capacity.adapter_rank
        groups = {one.suspects for one in taken}
        assert len(groups) <= 1 or groups == {""}

    def with_leases(self):
        return [entry for entry in self.entries.values() if entry.leases]

    @rule(data=st.data(), completion=st.sampled_from([1, 50, 300]))
    def finish(self, data, completion):
        entry = self.draw(data)
        if entry is None:
            return
        request = entry.request
        usage = TokenUsage(len(request.prompt_ids), 0, completion * request.sampling.n)
        event = Finished(
            request_id=request.request_id,
            attempt=request.attempt,
            choices=(),
            usage=usage,
            worker=entry.worker,
        )
        before = entry.state
        answered_by_worker = before == "finished" and entry.leases
        told = self.each("finish", entry, event)
        assert told == bool(before == "leased" or answered_by_worker)
        if before == "leased":
            self.expected_events.append(event)
            entry.state = "finished"

    def draw(self, data):
        entries = self.with_leases()
        return data.draw(st.sampled_from(entries)) if entries else None

    @rule(data=st.data())
    def start(self, data):
        if entry := self.draw(data):
            request = entry.request
            event = Started(
                request_id=request.request_id, attempt=request.attempt, worker=entry.worker
            )
            assert self.each("emit", entry, event) == (entry.state == "leased")
            if entry.state == "leased":
                self.expected_events.append(event)

    @rule(data=st.data())
    def release(self, data):
        entry = self.draw(data)
        if entry is None:
            return
        told = self.each("release", entry)
        assert told == (entry.state in ("leased", "ready"))
        if entry.state == "leased":
            if entry.request.request_id in self.tombstones:
                self.cancelled(entry)
            else:
                entry.state = "ready"

    @rule(data=st.data())
    def renew(self, data):
        entry = self.draw(data)
        if entry is None:
            return
        request_id = entry.request.request_id
        held = entry.state == "leased"
        expected = Renewal(
            lost=() if held else (request_id,),
            cancelled=(request_id,) if held and request_id in self.tombstones else (),
        )
        for queue, lease in zip(self.queues, entry.leases, strict=True):
            assert self.run(queue.renew(entry.worker, [lease])) == expected
        entry.expired = entry.expired and not held

    @rule(request_id=st.sampled_from(IDS))
    def cancel(self, request_id):
        entry = self.entries.get(request_id)
        ready = entry is not None and entry.state == "ready"
        assert self.all("cancel", [request_id]) == ([request_id] if ready else [])
        self.tombstones.add(request_id)
        if ready:
            self.cancelled(entry)

    @rule(request_id=st.sampled_from(IDS))
    def withdraw(self, request_id):
        entry = self.entries.get(request_id)
        ready = entry is not None and entry.state == "ready"
        assert self.all("withdraw", [request_id]) == ([request_id] if ready else [])
        if ready:
            del self.entries[request_id]

    @rule(data=st.data())
    def expire(self, data):
        entry = self.draw(data)
        if entry and entry.state == "leased":
            for world, lease in zip(self.worlds, entry.leases, strict=True):
                self.run(world.expire(lease))
            entry.expired = True

    @rule()
    def reap(self):
        reaped = self.all("reap")
        expired = {
            request_id
            for request_id, entry in self.entries.items()
            if entry.state == "leased" and entry.expired
        }
        assert set(reaped) == expired
        for request_id in reaped:
            entry = self.entries[request_id]
            if request_id in self.tombstones:
                self.cancelled(entry)
                continue
            self.expected_events.append(
                LeaseLost(
                    request_id=request_id,
                    attempt=entry.request.attempt,
                    worker=entry.worker,
                    alone=entry.request.suspects == request_id,
                )
            )
            entry.state = "lost"

    @rule(request_id=st.sampled_from(IDS))
    def forget(self, request_id):
        self.all("forget", [request_id])
        self.entries.pop(request_id, None)

    @rule()
    def collect(self):
        for stream in self.streams:
            entries = self.run(stream.read("c", 1_000, 0))
            assert [entry.event for entry in entries] == self.expected_events
            self.run(stream.ack([entry.entry_id for entry in entries]))
        self.expected_events = []

    @invariant()
    def depth_and_records_agree(self):
        counts = {name: {"ready": 0, "leased": 0} for name in CLASSES}
        for entry in self.entries.values():
            if entry.state in ("ready", "leased"):
                counts[entry.request.request_class][entry.state] += 1
        assert self.all("depth") == {name: ClassDepth(**one) for name, one in counts.items()}
        assert self.all("known", IDS) == [one in self.entries for one in IDS]

    @invariant()
    def counters_agree_and_stay_bounded(self):
        answers = [self.run(queue.counters()) for queue in self.queues]
        for name in CLASSES:
            waiting = {
                entry.request.tenant
                for entry in self.entries.values()
                if entry.state == "ready" and entry.request.request_class == name
            }
            for answer in answers:
                assert answer[name].keys() == waiting
                assert answer[name] == pytest.approx(answers[0][name])
                assert all(math.isfinite(one) for one in answer[name].values())

    def teardown(self):
        """An empty worker gets everything that is ready, in bounded time."""
        for _ in range(4 * len(IDS)):
            ready = [entry for entry in self.entries.values() if entry.state == "ready"]
            self.claim("w9", EMPTY_WORKER)
            left = [entry for entry in self.entries.values() if entry.state == "ready"]
            assert len(left) < len(ready) or not ready
        assert not left
        self.collect()
        for world in self.worlds:
            self.run(world.close())
        self.runner.close()


def bounded(examples, steps):
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def test_the_in_process_queue_follows_the_model(make_worlds):
    run_state_machine_as_test(
        lambda: QueueMachine(lambda: make_worlds("memory")), settings=bounded(150, 40)
    )


def test_redis_follows_the_model_and_the_in_process_queue(make_worlds):
    run_state_machine_as_test(
        lambda: QueueMachine(lambda: make_worlds("memory", "redis")), settings=bounded(25, 40)
    )
