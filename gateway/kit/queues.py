"""The queue's ports for every model, over one pool of Redis connections."""

from __future__ import annotations

from redis.asyncio import Redis

from gateway.kit.rates import Rates
from gateway.kit.statistics import Statistics
from worker.queue.base import (
    CompletionBell,
    EventStream,
    RequestQueue,
    SharedPrefixes,
    TokenStream,
    WorkerDirectory,
)
from worker.queue.redis import (
    Channels,
    RedisCompletionBell,
    RedisEventStream,
    RedisQueue,
    RedisSharedPrefixes,
    RedisTokenStream,
    RedisWorkerDirectory,
    connect,
)
from worker.queue.settings import QueueSettings


class Queues:
    """Ports by model name. Close it in the event loop that used it.

    However many clients wait: at most `connections` for commands, and one for notices.
    """

    def __init__(
        self, url: str, settings: QueueSettings | None = None, connections: int = 64
    ) -> None:
        self._settings = settings or QueueSettings()
        self._client: Redis = connect(url, connections)
        self._channels = Channels(self._client)
        self._queues: dict[str, RedisQueue] = {}
        self._tokens: dict[str, RedisTokenStream] = {}
        self.directory: WorkerDirectory = RedisWorkerDirectory(self._client)
        self.bell: CompletionBell = RedisCompletionBell(self._client, self._channels)
        self.rates = Rates(self._client)
        self.statistics = Statistics(self._client)

    def queue(self, model: str) -> RequestQueue:
        if model not in self._queues:
            self._queues[model] = RedisQueue(self._client, model, self._settings)
        return self._queues[model]

    def events(self, model: str) -> EventStream:
        return RedisEventStream(self._client, model, settings=self._settings)

    def tokens(self, model: str) -> TokenStream:
        if model not in self._tokens:
            self._tokens[model] = RedisTokenStream(self._client, model, self._channels)
        return self._tokens[model]

    def prefixes(self, model: str) -> SharedPrefixes:
        return RedisSharedPrefixes(self._client, model)

    async def close(self) -> None:
        await self._channels.close()
        await self._client.aclose()
