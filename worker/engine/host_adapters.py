"""Adapters in host memory, the tier between disk and the device."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

from worker.engine.rank_pool import LoadedAdapter


class HostAdapters:
    """The most recently used adapters, in at most `capacity` bytes. Not thread-safe."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._adapters: OrderedDict[str, LoadedAdapter] = OrderedDict()
        self._bytes = 0

    def latest(self, most: int) -> tuple[str, ...]:
        """Digests of those used last, the very last first."""
        return tuple(islice(reversed(self._adapters), most))

    def has(self, digest: str) -> bool:
        return digest in self._adapters

    def get(self, digest: str) -> LoadedAdapter | None:
        adapter = self._adapters.get(digest)
        if adapter is not None:
            self._adapters.move_to_end(digest)
        return adapter

    def drop(self, digest: str) -> None:
        adapter = self._adapters.pop(digest, None)
        self._bytes -= 0 if adapter is None else adapter.nbytes

    def put(self, digest: str, adapter: LoadedAdapter) -> None:
        """Keep `adapter` unless it alone is larger than the capacity."""
        if digest in self._adapters or adapter.nbytes > self._capacity:
            return
        while self._bytes + adapter.nbytes > self._capacity:
            _, evicted = self._adapters.popitem(last=False)
            self._bytes -= evicted.nbytes
        self._adapters[digest] = adapter
        self._bytes += adapter.nbytes
