"""Redis channels for any number of listeners, over one connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as Unreachable
from redis.exceptions import RedisError

from worker.queue.base import QueueUnavailable
from worker.queue.cancelling import end
from worker.queue.connection import SOCKET_TIMEOUT, address, reaching

Tell = Callable[[bytes | None], None]

_RETRY_SECONDS = 1.0

_log = structlog.get_logger(__name__)


class Channels:
    """Calls listeners with what is published, and with None whenever something may have been
    missed: the subscription was made, or made anew, or cannot be made for now.

    What is subscribed follows from who listens, so that a new connection is told all of it.
    """

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._listeners: dict[bytes, set[Tell]] = {}
        self._changed: dict[bytes, None] = {}
        self._stale = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    @contextmanager
    def listen(self, channel: str, tell: Tell) -> Iterator[None]:
        self.add(channel, tell)
        try:
            yield
        finally:
            self.remove(channel, tell)

    def add(self, channel: str, tell: Tell) -> None:
        """Needs a running event loop."""
        if self._running is None:
            self._running = asyncio.create_task(self._run(), name="channels")
        self._listeners.setdefault(channel.encode(), set()).add(tell)
        self._change(channel.encode())  # again where others listen: the answer is for all

    def remove(self, channel: str, tell: Tell) -> None:
        listeners = self._listeners[channel.encode()]
        listeners.discard(tell)
        if not listeners:
            del self._listeners[channel.encode()]
            self._change(channel.encode())

    async def close(self) -> None:
        if self._running is not None:
            running, self._running = self._running, None
            await end(running)

    def _change(self, channel: bytes) -> None:
        self._changed[channel] = None
        self._stale.set()

    async def _run(self) -> None:
        away = False
        while True:
            try:
                with reaching(address(self._client)):
                    await self._converse()
            except (QueueUnavailable, RedisError, OSError) as error:
                if not away:
                    _log.warning("channels_unavailable", reason=str(error))
                away = True
            for channel in list(self._listeners):
                self._tell(channel, None)
            await asyncio.sleep(_RETRY_SECONDS)

    async def _converse(self) -> None:
        pool: Any = self._client.connection_pool
        connection = pool.make_connection()
        try:
            await connection.connect()
            self._changed = dict.fromkeys(self._listeners)
            self._stale.set()
            writing = asyncio.create_task(self._write(connection))
            try:
                await self._read(connection)
            finally:
                await end(writing)
        finally:
            await connection.disconnect(nowait=True)

    async def _write(self, connection: AbstractConnection) -> None:
        """Whatever fails here ends the connection, and so the reading."""
        while True:
            await self._stale.wait()
            self._stale.clear()
            changed, self._changed = self._changed, {}
            wanted = [channel for channel in changed if channel in self._listeners]
            others = [channel for channel in changed if channel not in self._listeners]
            for command, channels in (("UNSUBSCRIBE", others), ("SUBSCRIBE", wanted)):
                if channels:
                    await connection.send_command(command, *channels, check_health=False)

    async def _read(self, connection: AbstractConnection) -> None:
        asked = False
        while True:
            reply: Any = await connection.read_response(timeout=SOCKET_TIMEOUT)
            if reply is None and asked:
                raise Unreachable("no answer to PING")
            asked = reply is None
            if asked:
                await connection.send_command("PING", check_health=False)
            elif reply[0] == b"message":
                self._tell(reply[1], reply[2])
            elif reply[0] == b"subscribe":
                self._tell(reply[1], None)

    def _tell(self, channel: bytes, data: bytes | None) -> None:
        for tell in list(self._listeners.get(channel, ())):
            tell(data)
