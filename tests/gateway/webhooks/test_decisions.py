"""The parts that are pure: the schedule, the circuit breaker, who gets the free places."""

from __future__ import annotations

from collections import Counter

import pytest

from gateway.settings import Settings
from gateway.webhooks.breaker import (
    FIRST_PAUSE_MS,
    LONGEST_PAUSE_MS,
    Health,
    after_failure,
    after_success,
    room,
)
from gateway.webhooks.claims import DueEndpoint
from gateway.webhooks.schedule import DELAYS_MS, GIVE_UP_MS, JITTER, MOST_TRIES, delay_ms
from gateway.webhooks.shares import Busy, shares

HOUR = 3_600_000
SETTINGS = Settings(
    webhook_concurrency=10,
    webhook_tenant_concurrency=6,
    webhook_endpoint_concurrency=4,
    webhook_failures=5,
)


def test_the_schedule_is_that_of_standard_webhooks() -> None:
    planned = [delay_ms(tries, None, 0.5) for tries in range(MOST_TRIES)]
    assert planned == list(DELAYS_MS)
    hours = [5 / 3600, 5 / 60, 0.5, 2, 5, 10, 14, 20, 24]
    assert [each / HOUR for each in DELAYS_MS[1:]] == pytest.approx(hours)
    assert delay_ms(MOST_TRIES, None, 0.5) is None
    assert sum(DELAYS_MS) * (1 + JITTER) < GIVE_UP_MS


def test_jitter_spreads_and_retry_after_only_postpones() -> None:
    spread = {delay_ms(2, None, chance / 100) for chance in range(100)}
    assert min(spread) == 270_000
    assert max(spread) < 330_000
    assert len(spread) > 90
    assert delay_ms(1, 60_000, 0.5) == 60_000
    assert delay_ms(2, 60_000, 0.5) == 300_000
    assert delay_ms(1, 10**12, 0.5) == 24 * HOUR
    assert delay_ms(MOST_TRIES, 60_000, 0.5) is None


def test_the_breaker_opens_doubles_and_closes() -> None:
    health, now = Health(), 1_000_000
    for later in range(4):
        health = after_failure(health, now + later, 5, None)
    assert health == Health(4, failing_since=now)
    pauses = []
    for _ in range(9):
        health = after_failure(health, now, 5, None)
        assert health.paused_until is not None
        pauses.append(health.paused_until - now)
        late = after_failure(health, now + 1, 5, None)
        assert late == health  # it was on its way when the breaker opened
        assert health.failing_since == 1_000_000
        assert room(health.failures, 5, 4) == 1
        now = health.paused_until
    assert pauses == [min(FIRST_PAUSE_MS * 2**n, LONGEST_PAUSE_MS) for n in range(9)]
    assert after_success() == Health(0, None, None)
    assert room(0, 5, 4) == room(4, 5, 4) == 4


def test_a_receiver_that_asks_for_time_gets_it() -> None:
    assert after_failure(Health(), 1000, 5, 30_000) == Health(1, 1000, 31_000)
    assert after_failure(Health(), 1000, 5, 10**12) == Health(1, 1000, 1000 + LONGEST_PAUSE_MS)
    longer = after_failure(Health(1, 1000, 31_000), 2000, 5, 60_000)
    assert longer == Health(1, 1000, 62_000)


def endpoint(number: int, tenant: str, due_at: int = 0, failures: int = 0) -> DueEndpoint:
    return DueEndpoint(f"we_{number}", tenant, failures, due_at)


def test_places_go_round_tenants_then_their_endpoints() -> None:
    many = [endpoint(number, "a") for number in range(50)]
    given = shares([*many, endpoint(90, "b"), endpoint(91, "c")], Busy(), SETTINGS)
    assert sum(given.values()) == 10
    assert (given["we_90"], given["we_91"]) == (3, 3)
    of_a = [count for name, count in given.items() if name not in {"we_90", "we_91"}]
    assert of_a == [1, 1, 1, 1]


def test_nobody_gets_more_than_its_most() -> None:
    assert shares([endpoint(1, "a")], Busy(), SETTINGS) == {"we_1": 4}
    assert shares([endpoint(1, "a", failures=5)], Busy(), SETTINGS) == {"we_1": 1}
    two = [endpoint(1, "a"), endpoint(2, "a")]
    assert shares(two, Busy(), SETTINGS) == {"we_1": 3, "we_2": 3}
    busy = Busy(Counter({"we_1": 4, "we_9": 2}), Counter({"a": 5, "b": 1}))
    assert shares([*two, endpoint(3, "b")], busy, SETTINGS) == {"we_3": 4}
    failing = Busy(Counter({"we_1": 1}), Counter({"a": 1}))
    assert shares([endpoint(1, "a", failures=9)], failing, SETTINGS) == {}


def test_what_came_due_first_goes_first() -> None:
    due = [endpoint(number, f"tenant-{number}", due_at=-number) for number in range(30)]
    assert shares(due, Busy(), SETTINGS) == {f"we_{number}": 1 for number in range(20, 30)}
