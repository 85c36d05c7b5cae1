"""The way to Redis: a client with bounds on every wait, and errors its caller can act on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import AuthenticationError, AuthorizationError, RedisError, ResponseError
from redis.exceptions import ConnectionError as Unreachable
from redis.exceptions import TimeoutError as TimedOut

from worker.queue.base import QueueUnavailable

SOCKET_TIMEOUT = 10.0

_REFUSALS = {
    "OOM": "it is out of memory: raise maxmemory (policy noeviction), or wait for work to finish",
    "READONLY": "it is a replica: point REDIS_URL at the primary",
    "LOADING": "it is loading its data: try again shortly",
    "MISCONF": "it cannot write its snapshot to disk: see its log",
    "MASTERDOWN": "its primary is down: try again shortly",
    "NOREPLICAS": "too few replicas are up: try again shortly",
    "CLUSTERDOWN": "its cluster is down: try again shortly",
    "BUSY": "a script keeps it busy: try again shortly",
    "NOAUTH": "it wants a password: set one in REDIS_URL",
    "WRONGPASS": "it refuses the user name or password in REDIS_URL",
    "NOPERM": "the user in REDIS_URL lacks a permission",
}


def connect(url: str) -> Redis:
    """A client for the queue's classes; nothing is sent before its first use.

    `redis://`, `rediss://` or `unix://`, with user, password and database as redis-py reads them.
    """
    return Redis.from_url(
        url,
        protocol=2,
        socket_timeout=SOCKET_TIMEOUT,
        socket_connect_timeout=5.0,
        health_check_interval=30,
        retry=Retry(ExponentialWithJitterBackoff(base=0.05, cap=0.5), retries=2),
    )


def address(client: Redis) -> str:
    """Where the client connects to; never a user name or password."""
    known = client.connection_pool.connection_kwargs
    if path := known.get("path"):
        return f"unix:{path}"
    return f"{known.get('host', 'localhost')}:{known.get('port', 6379)}"


@contextmanager
def reaching(where: str) -> Iterator[None]:
    """Raise QueueUnavailable, naming the server and a remedy, for what its operator must mend."""
    try:
        yield
    except RedisError as error:
        remedy = _remedy(error)
        if remedy is None:
            raise
        raise QueueUnavailable(f"Redis at {where}: {remedy}") from error


def _remedy(error: RedisError) -> str | None:
    if isinstance(error, AuthenticationError | AuthorizationError):
        return _REFUSALS["WRONGPASS"]
    words = set(str(error).replace(":", " ").replace("-", " ").split()[:40])
    refusal = next((text for word, text in _REFUSALS.items() if word in words), None)
    if refusal is not None and isinstance(error, ResponseError | Unreachable):
        return refusal
    names = {kind.__name__: text for kind, text in _BY_TYPE.items() if isinstance(error, kind)}
    return next(iter(names.values()), None)


_BY_TYPE: dict[type[RedisError], str] = {
    TimedOut: "it does not answer in time: check its load and the network",
    Unreachable: "it cannot be reached: check that it runs and that REDIS_URL is right",
}
