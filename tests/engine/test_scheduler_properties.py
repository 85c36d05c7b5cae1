"""Random traffic through tiny pools: nothing leaks, nothing is wrongly shared, all of it ends.

The shadow runner checks every slot it reads (`shadow.py`), the harness every step's bookkeeping.
An answer must be that of the request alone, whatever was preempted, shared or cancelled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.harness import Harness, adapter
from tests.engine.shadow import ShadowResidency
from worker.engine.outputs import CancelledOutput, FailedOutput
from worker.protocol.types import RequestId, SamplingParams, SharedPrefix

ADAPTERS = {None: 0, "a": 4, "b": 8, "c": 12, "late": 4, "broken": 4}


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: tuple[int, ...]
    max_tokens: int
    n: int
    priority: int
    adapter: str | None
    scope: str
    shared: int
    predicted: int
    cancelled_after: int | None


PREFIXES = [tuple(range(12)), tuple(range(8)), (5,) * 9, ()]

arrivals = st.builds(
    Arrival,
    step=st.integers(0, 30),
    prompt=st.builds(
        lambda prefix, tail: prefix + tuple(tail) or (1,),
        st.sampled_from(PREFIXES),
        st.lists(st.integers(0, 3), max_size=8),
    ),
    max_tokens=st.integers(1, 14),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    priority=st.integers(0, 2),
    adapter=st.sampled_from(list(ADAPTERS)),
    scope=st.sampled_from(["tenant", "other"]),
    shared=st.sampled_from([0, 0, 4, 6, 8]),
    predicted=st.sampled_from([1, 1, 1, 14]),
    cancelled_after=st.one_of(st.none(), st.none(), st.integers(0, 12)),
)

configs = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(9, 40),
        "windows": st.sampled_from([(None,), (None,), (5,), (None, 5), (None, 3, 9), (4, 4)]),
        "block_size": st.sampled_from([1, 2, 4]).filter(lambda size: size > 1),
        "token_budget": st.sampled_from([1, 3, 7, 16, 64]),
        "max_sequences": st.sampled_from([1, 3, 8]),
        "watermark": st.sampled_from([0.3, 0.9, 1.0, 1.0]),
        "mode": st.sampled_from(["continuous", "continuous", "dynamic", "static"]),
        "policy": st.sampled_from(["decode_first", "prefill_first"]),
        "prefix_caching": st.sampled_from([True, True, False]),
        "drain_after": st.sampled_from([0, 4, 64]),
        "class_headstart": st.sampled_from([0, 2, 256]),
        "waiting_served_ratio": st.sampled_from([0.0, 1.0]),
        "adapter_rank": st.just(12),
        "pinned_share": st.sampled_from([0.0, 0.5]),
    }
)

pins = st.dictionaries(  # by step, what is shared from then on
    st.integers(0, 40),
    st.lists(
        st.builds(SharedPrefix, st.sampled_from(PREFIXES), st.sampled_from(["", "a", "late"]))
    ),
)

hashes = st.sampled_from([hash, hash, lambda content: 0, lambda content: hash(content) % 3])


def _fits(arrival: Arrival, harness: Harness) -> bool:
    tokens = len(arrival.prompt) + arrival.max_tokens - 1
    return harness.config.most_blocks(tokens) <= harness.config.request_blocks


def _drive(
    harness: Harness, planned: list[Arrival], shared: dict[int, list[SharedPrefix]]
) -> dict[str, Arrival]:
    added: dict[str, Arrival] = {}
    cancels: dict[int, list[str]] = {}
    todo = sorted(planned, key=lambda arrival: arrival.step)
    step = 0
    while todo or harness.engine.has_work():
        while todo and todo[0].step <= step:
            arrival = todo.pop(0)
            if not _fits(arrival, harness):
                continue
            name = str(len(added))
            added[name] = arrival
            _add(harness, name, arrival)
            if arrival.cancelled_after is not None:
                cancels.setdefault(step + arrival.cancelled_after, []).append(name)
        harness.engine.cancel([RequestId(name) for name in cancels.pop(step, ())])
        if step in shared:
            harness.engine.share(shared[step])
        harness.step()
        harness.clock.seconds += 0.01
        _check_watermark(harness)
        step += 1
        assert step < 3_000, f"starved: {harness.engine.stats()}"
    return added


def _add(harness: Harness, name: str, arrival: Arrival) -> None:
    harness.add(
        name,
        arrival.prompt,
        sampling=SamplingParams(max_tokens=arrival.max_tokens, n=arrival.n),
        priority=arrival.priority,
        adapter=adapter(arrival.adapter, ADAPTERS[arrival.adapter]) if arrival.adapter else None,
        cache_scope=arrival.scope,
        shared_tokens=min(arrival.shared, len(arrival.prompt)),
        predicted_output=arrival.predicted,
    )


def _check_watermark(harness: Harness) -> None:
    """Whoever was admitted in this step fitted under the watermark, or runs alone.

    (Under `prefill_first` running answers may outgrow their promise after the admission. Behind
    windows, chunks need more for one step, and who leaves a shared prefix behind needs its own.)
    """
    scheduler = harness.engine.scheduler
    if harness.config.policy == "prefill_first" or harness.config.windows != (None,):
        return
    if harness.admitted_now() and len(scheduler.running) > 1:
        promised = scheduler.blocks.num_used + scheduler.outstanding()
        assert promised <= harness.config.watermark_blocks


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(
    config=configs,
    planned=st.lists(arrivals, min_size=1, max_size=24),
    shared=pins,
    delay=st.integers(0, 3),
    hash_block=hashes,
)
def test_random_traffic(
    config: dict[str, object],
    planned: list[Arrival],
    shared: dict[int, list[SharedPrefix]],
    delay: int,
    hash_block: Callable[[object], int],
) -> None:
    residency = ShadowResidency(12, delay, {"broken": "adapter_invalid"})
    residency.starts["late"] = 6
    harness = Harness(residency=residency, **config)
    harness.engine.scheduler.blocks.cache._hash = hash_block
    added = _drive(harness, planned, shared)
    harness.engine.share([])
    harness.check_idle()
    finished = harness.finished()
    cancelled = {output.request_id for output in harness.of(CancelledOutput)}
    failed = {output.request_id for output in harness.of(FailedOutput)}
    assert len(finished) + len(cancelled) + len(failed) == len(added), "one end for each"
    for name, arrival in added.items():
        if name in finished:
            assert harness.answers(name) == _expected(harness, arrival)
        elif name in failed:
            assert arrival.adapter == "broken"
        else:
            assert arrival.cancelled_after is not None


def _expected(harness: Harness, arrival: Arrival) -> list[list[int]]:
    start = harness.residency.starts.get(arrival.adapter or "", 0)
    return [
        harness.runner.expected(
            arrival.prompt, arrival.adapter or "", choice, arrival.max_tokens, start
        )
        for choice in range(arrival.n)
    ]
