"""Webhooks as Prometheus sees them: no label names a tenant, an endpoint or a URL.

Attempts and ends are counted by who makes them, in the deployment's statistics; what waits, and how
endpoints are, is read from SQL for a scrape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from gateway.kit.statistics import Counts, add_histogram, count_seconds
from gateway.models import WebhookDelivery
from gateway.webhooks.backlog import COUNTED, Backlog
from gateway.webhooks.outcomes import Attempted
from gateway.webhooks.sending import ERRORS, Outcome

RESULTS = ("2xx", "3xx", "4xx", "5xx", "other", *ERRORS)
ENDS = ("delivered", "failed")

_ATTEMPT = "webhook:attempt"
_DELIVERY = "webhook:delivery"


def counts_of(attempted: Sequence[Attempted], ended: Sequence[WebhookDelivery]) -> Counts:
    counts = Counts()
    for each in attempted:
        counts[f"{_ATTEMPT}:{_result(each.outcome)}"] += 1
        count_seconds(counts, f"{_ATTEMPT}:seconds", each.outcome.duration_ms / 1000)
    for delivery in ended:
        counts[f"{_DELIVERY}:{delivery.state}"] += 1
        if delivery.state == "delivered" and delivery.finished_at is not None:
            seconds = max(0, delivery.finished_at - delivery.created_at) / 1000
            count_seconds(counts, f"{_DELIVERY}:seconds", seconds)
    return counts


def given_up(deliveries: int) -> Counts:
    return Counts({f"{_DELIVERY}:failed": deliveries} if deliveries else {})


def families(counts: Mapping[str, float], backlog: Backlog) -> Iterator[Any]:
    yield _counter(
        "batten_webhook_attempts",
        "Attempts to deliver a webhook, by the receiver's status or what went wrong",
        "result",
        {each: counts.get(f"{_ATTEMPT}:{each}", 0.0) for each in RESULTS},
    )
    yield _counter(
        "batten_webhook_deliveries",
        "Deliveries that ended: delivered, or failed for good",
        "state",
        {each: counts.get(f"{_DELIVERY}:{each}", 0.0) for each in ENDS},
    )
    for name, key, text in (
        ("batten_webhook_attempt_seconds", _ATTEMPT, "Seconds of an attempt, whatever came of it"),
        ("batten_webhook_delivery_seconds", _DELIVERY, "Seconds from an event until it arrived"),
    ):
        seconds = HistogramMetricFamily(name, text, labels=[])
        add_histogram(seconds, [], counts, f"{key}:seconds")
        yield seconds
    yield _gauge(
        "batten_webhook_pending",
        "Deliveries on their way: due now, waiting for their next attempt, or held back as their "
        f"endpoint is paused or disabled; no more than the {COUNTED:,} oldest are counted",
        backlog.pending,
    )
    yield _gauge(
        "batten_webhook_endpoints",
        "Registered endpoints: healthy, failing, paused after failures, or disabled; no more than "
        f"{COUNTED:,} are counted",
        backlog.endpoints,
    )
    late = GaugeMetricFamily(
        "batten_webhook_overdue_seconds", "How long the first delivery that is due has been so"
    )
    late.add_metric([], backlog.overdue_seconds)
    yield late


def _result(outcome: Outcome) -> str:
    if outcome.error is not None:
        return outcome.error
    kind = f"{(outcome.status_code or 0) // 100}xx"
    return kind if kind in RESULTS else "other"


def _counter(name: str, text: str, label: str, values: Mapping[str, float]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for each, value in values.items():
        family.add_metric([each], value)
    return family


def _gauge(name: str, text: str, values: Mapping[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=["state"])
    for state, value in values.items():
        family.add_metric([state], value)
    return family
