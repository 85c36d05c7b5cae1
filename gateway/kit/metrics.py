"""Prometheus metrics of one process, in a registry of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.registry import Collector

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ("method", "route", "status")
        self._requests = Counter(
            "batten_http_requests", "HTTP requests answered", labels, registry=self.registry
        )
        self._seconds = Histogram(
            "batten_http_request_seconds",
            "Seconds from first byte in to last byte out",
            ("method", "route"),
            registry=self.registry,
        )

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        method = method if method in _METHODS else "other"
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)

    def render(self, others: Iterable[Any]) -> bytes:
        """This process's metrics, and families made for this scrape."""
        made = CollectorRegistry(auto_describe=False)
        made.register(_Families(others))
        return generate_latest(self.registry) + generate_latest(made)


class _Families(Collector):
    def __init__(self, families: Iterable[Any]) -> None:
        self._families = families

    def collect(self) -> Iterable[Any]:
        return self._families
