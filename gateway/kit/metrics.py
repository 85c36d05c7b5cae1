"""Prometheus metrics of one process, in a registry of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest


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
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)

    def render(self) -> bytes:
        return generate_latest(self.registry)
