"""The way to Redis: a client with bounds on every wait, and errors its caller can act on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from redis import exceptions as errors
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import RedisError

from worker.queue.base import QueueUnavailable

SOCKET_TIMEOUT = 5.0

# A refusal is known by its class, or by its words where a script or the handshake reports it.
_REFUSALS: tuple[tuple[tuple[type[RedisError], ...], tuple[str, ...], str], ...] = (
    (
        (errors.OutOfMemoryError,),
        ("OOM ",),
        "it is out of memory: raise maxmemory (policy noeviction), or wait for work to finish",
    ),
    (
        (errors.ReadOnlyError,),
        ("READONLY ",),
        "it is a replica: point REDIS_URL at the primary",
    ),
    ((errors.BusyLoadingError,), ("LOADING ",), "it is loading its data: try again shortly"),
    ((), ("MISCONF ",), "it cannot write its snapshot to disk: see its log"),
    ((errors.MasterDownError,), ("MASTERDOWN ",), "its primary is down: try again shortly"),
    ((), ("NOREPLICAS ",), "too few replicas are up: try again shortly"),
    ((errors.ClusterDownError,), ("CLUSTERDOWN ",), "its cluster is down: try again shortly"),
    ((), ("BUSY ",), "a script keeps it busy: try again shortly"),
    ((), ("NOAUTH ", "Authentication required"), "it wants a password: set one in REDIS_URL"),
    (
        (errors.AuthenticationError, errors.AuthorizationError),
        ("WRONGPASS ", "username-password pair", "without any password configured"),
        "it refuses the user name or password in REDIS_URL",
    ),
    ((errors.NoPermissionError,), ("NOPERM ",), "the user in REDIS_URL lacks a permission"),
    ((errors.TimeoutError,), (), "it does not answer in time: check its load and the network"),
    (
        (errors.ConnectionError,),
        (),
        "it cannot be reached: check that it runs and that REDIS_URL is right",
    ),
)


def connect(url: str, connections: int = 64) -> Redis:
    """A client for the queue's classes; nothing is sent before its first use.

    `redis://`, `rediss://` or `unix://`, with user, password and database as redis-py reads them.
    Commands share at most `connections`; who finds all of them busy waits for one.
    """
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=connections,
        timeout=SOCKET_TIMEOUT,
        protocol=2,
        socket_timeout=SOCKET_TIMEOUT,
        socket_connect_timeout=5.0,
        health_check_interval=30,
        retry=Retry(ExponentialWithJitterBackoff(base=0.05, cap=0.5), retries=2),
    )
    return Redis.from_pool(pool)


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
    said = str(error)
    for kinds, words, remedy in _REFUSALS:
        if isinstance(error, kinds) or any(word in said for word in words):
            return remedy
    return None
