"""The queue's ports in production: Redis 6.2 or later, or Valkey."""

from worker.queue.bell import RedisCompletionBell
from worker.queue.connection import connect
from worker.queue.directory import RedisWorkerDirectory
from worker.queue.redis_queue import RedisQueue
from worker.queue.streams import RedisEventStream, RedisTokenStream

__all__ = [
    "RedisCompletionBell",
    "RedisEventStream",
    "RedisQueue",
    "RedisTokenStream",
    "RedisWorkerDirectory",
    "connect",
]
