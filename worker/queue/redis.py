"""The queue's ports in production: Redis 6.2 or later, or Valkey."""

from worker.queue.bell import RedisCompletionBell
from worker.queue.channels import Channels
from worker.queue.connection import connect
from worker.queue.directory import RedisWorkerDirectory
from worker.queue.prefixes import RedisSharedPrefixes
from worker.queue.redis_queue import RedisQueue
from worker.queue.streams import RedisEventStream
from worker.queue.token_streams import RedisTokenStream

__all__ = [
    "Channels",
    "RedisCompletionBell",
    "RedisEventStream",
    "RedisQueue",
    "RedisSharedPrefixes",
    "RedisTokenStream",
    "RedisWorkerDirectory",
    "connect",
]
