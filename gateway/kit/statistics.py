"""Numbers of the whole deployment: counted in one Redis hash by collectors and control processes,
shown by each API.

They start anew when Redis loses its data, as Prometheus expects of counters.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from itertools import accumulate, product
from typing import Any, Literal, cast

import structlog
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from redis.asyncio import Redis

from worker.protocol.types import REQUEST_CLASSES
from worker.queue.base import QueueUnavailable
from worker.queue.connection import address, reaching

Phase = Literal["queue", "prefill", "decode", "e2e"]
TokenKind = Literal["prompt", "cached", "completion"]
PHASES: tuple[Phase, ...] = ("queue", "prefill", "decode", "e2e")
TOKEN_KINDS: tuple[TokenKind, ...] = ("prompt", "cached", "completion")

BOUNDS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    *(120.0, 300.0, 600.0, 1800.0, 3600.0, 4 * 3600.0, 24 * 3600.0),
)
"""Upper bounds of the histograms' buckets, in seconds; a last bucket has none."""

_KEY = "batten:{statistics}"

Counts = Counter[str]

_log = structlog.get_logger(__name__)


def count_seconds(counts: Counts, name: str, seconds: float) -> None:
    """Into the histogram `name`."""
    counts[f"{name}:{bisect_left(BOUNDS, seconds)}"] += 1
    counts[f"{name}:sum"] += seconds  # type: ignore[assignment]


def add_histogram(
    family: HistogramMetricFamily, labels: Sequence[str], counts: Mapping[str, float], name: str
) -> None:
    """The histogram `name`, as a metric of `family`."""
    names = [*map(str, BOUNDS), "+Inf"]
    buckets = accumulate(counts.get(f"{name}:{place}", 0.0) for place in range(len(names)))
    family.add_metric(
        labels, list(zip(names, buckets, strict=True)), counts.get(f"{name}:sum", 0.0)
    )


def count_phase(counts: Counts, request_class: str, phase: Phase, seconds: float) -> None:
    count_seconds(counts, _phase(request_class, phase), seconds)


def count_tokens(counts: Counts, request_class: str, kind: TokenKind, tokens: int) -> None:
    counts[f"tokens:{request_class}:{kind}"] += tokens


class Statistics:
    def __init__(self, client: Redis) -> None:
        self._client = client

    async def add(self, counts: Mapping[str, float]) -> None:
        """Raises QueueUnavailable."""
        with reaching(address(self._client)):
            pipeline = self._client.pipeline(transaction=False)
            for name, value in counts.items():
                pipeline.hincrbyfloat(_KEY, name, value)
            await pipeline.execute()

    async def add_or_lose(self, counts: Mapping[str, float]) -> None:
        """A statistic that an outage loses is lost."""
        if not counts:
            return
        try:
            await self.add(counts)
        except QueueUnavailable as error:
            _log.warning("statistics_not_counted", error=str(error))

    async def read(self) -> dict[str, float]:
        """Raises QueueUnavailable."""
        with reaching(address(self._client)):
            found = await cast(Awaitable[dict[bytes, bytes]], self._client.hgetall(_KEY))
        return {name.decode(): float(value) for name, value in found.items()}


def _phase(request_class: str, phase: Phase) -> str:
    return f"seconds:{request_class}:{phase}"


def families(counts: Mapping[str, float]) -> Iterator[Any]:
    """Of requests, as Prometheus wants them."""
    seconds = HistogramMetricFamily(
        "batten_request_seconds",
        "Seconds of answered requests: waiting (queue), computed (prefill, decode), and from "
        "submission until the answer was recorded (e2e); of all processes",
        labels=["class", "phase"],
    )
    for request_class, phase in product(REQUEST_CLASSES, PHASES):
        add_histogram(seconds, [request_class, phase], counts, _phase(request_class, phase))
    yield seconds
    tokens = CounterMetricFamily(
        "batten_tokens",
        "Tokens of answered requests; cached ones are prompt tokens too; of all processes",
        labels=["class", "kind"],
    )
    for request_class, kind in product(REQUEST_CLASSES, TOKEN_KINDS):
        tokens.add_metric([request_class, kind], counts.get(f"tokens:{request_class}:{kind}", 0.0))
    yield tokens
