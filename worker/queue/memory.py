"""The queue's ports in one process, for tests and offline use: no server, nothing survives it."""

from worker.queue.memory_queue import MemoryQueue
from worker.queue.memory_state import MemoryServer
from worker.queue.memory_streams import (
    MemoryCompletionBell,
    MemoryEventStream,
    MemorySharedPrefixes,
    MemoryTokenStream,
    MemoryWorkerDirectory,
)

__all__ = [
    "MemoryCompletionBell",
    "MemoryEventStream",
    "MemoryQueue",
    "MemoryServer",
    "MemorySharedPrefixes",
    "MemoryTokenStream",
    "MemoryWorkerDirectory",
]
