"""Adapters resident on the device: rank rows, pins, eviction, and loading off the step thread.

absent --prepare--> loading --loaded--> ready --evicted (unpinned, least recently used)--> absent
                       |
                       +--failed--> failed --prepare--> AdapterLoadError

A load is a read (several at once: disk or object store, into host memory) and then a write into
the pool (one at a time). What is prefetched has been read by the time that rows come free.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from worker.engine.activation import activation
from worker.engine.batch import AdapterLoadError
from worker.engine.compute_threads import in_passing
from worker.engine.host_adapters import HostAdapters
from worker.engine.metrics import AdapterCounts
from worker.engine.rank_pool import LoadedAdapter, RankPool
from worker.engine.rank_rows import RankRows
from worker.engine.remembered import Remembered
from worker.protocol.errors import AdapterErrorCode
from worker.protocol.types import AdapterRef

MOST_TOLD = 128
"""Most adapters in host memory that `resident` names: it is part of every claim."""

AdapterSource = Callable[[AdapterRef], LoadedAdapter]

READERS = 4
AHEAD = 32
"""Most adapters that are being read: prefetching waits for nobody who needs rows now."""


@dataclass(slots=True)
class _Resident:
    rows: tuple[int, ...]
    ready: bool = False
    pins: int = 0
    extra: int = 0  # bytes besides the rows
    invocation: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Failure:
    code: AdapterErrorCode  # the error itself would keep what was loaded alive
    message: str
    until: float | None  # monotonic seconds; None: for good
    is_told: bool = True  # else those who want it wait, for the store to answer again


class AdapterCache:
    """Implements `worker.engine.batch.AdapterResidency`, and `rows` for the runner.

    `extra_memory` bounds the bytes that all of them take besides their rows (biases, norms,
    output heads, embeddings). `source` reads and checks an adapter (disk, object store) and
    raises AdapterLoadError; it runs on threads of this cache, several at once. `on_change` is
    called on one of them whenever an adapter became ready or failed, so that an idle engine can be
    woken. An unavailable adapter may be tried again after `retry_after` seconds, an invalid one
    never. While the store of all adapters does not answer, it is asked again for each every
    `away_seconds`, and only after `patience` seconds is that a failure.
    """

    def __init__(
        self,
        pool: RankPool,
        source: AdapterSource,
        *,
        host_memory: int = 1 << 30,
        extra_memory: int = 1 << 30,
        retry_after: float = 30.0,
        patience: float = 300.0,
        away_seconds: float = 5.0,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._source = source
        self._extra_memory = extra_memory
        self._extra_bytes = Remembered[int]()
        self._retry_after = retry_after
        self._patience = patience
        self._away_seconds = away_seconds
        self._away_since = Remembered[float]()
        self._on_change = on_change
        self._clock = clock
        self._lock = threading.Lock()
        self._rows = RankRows(pool.rank)
        self._resident: OrderedDict[str, _Resident] = OrderedDict()  # least recently used first
        self._failures = Remembered[_Failure]()
        self._probed = Remembered[None]()
        self._host = HostAdapters(host_memory)
        self._counts = AdapterCounts()
        self._reading: dict[str, Future[LoadedAdapter]] = {}
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="adapter-reader")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="adapter-writer")

    def close(self) -> None:
        """Wait for loads in progress and drop the ones that wait."""
        self._readers.shutdown(cancel_futures=True)
        self._writer.shutdown(cancel_futures=True)

    def prefetch(self, adapter: AdapterRef) -> None:
        """See AdapterResidency. One that cannot be read is said to be so by `prepare`."""
        with self._lock:
            known = adapter.digest in self._resident or adapter.digest in self._failures
            if not known and len(self._reading) < AHEAD and not self._host.has(adapter.digest):
                self._read_soon(adapter)

    def prepare(self, adapter: AdapterRef) -> bool:
        """See AdapterResidency. A refused adapter that is larger than the pool is invalid."""
        with self._lock:
            resident = self._resident.get(adapter.digest)
            if resident is not None:
                self._resident.move_to_end(adapter.digest)
                return resident.ready
            self._raise_failure(adapter)
            if adapter.digest in self._failures:
                return False
            if not self._make_room(adapter.rank, self._extra_bytes.get(adapter.digest, 0)):
                return False
            self._resident[adapter.digest] = _Resident(self._rows.take(adapter.rank))
            read = self._read_soon(adapter)
        read.add_done_callback(partial(self._write_soon, adapter))
        return False

    def first_token(self, adapter: AdapterRef, prompt_ids: tuple[int, ...]) -> int:
        """See AdapterResidency. Raises KeyError unless the adapter is ready."""
        with self._lock:
            invocation = self._ready(adapter).invocation
        return activation(prompt_ids, invocation)

    def pin(self, adapter: AdapterRef) -> None:
        """Raises KeyError unless the adapter is ready."""
        with self._lock:
            self._ready(adapter).pins += 1

    def unpin(self, adapter: AdapterRef) -> None:
        with self._lock:
            resident = self._ready(adapter)
            if not resident.pins:
                raise ValueError(f"adapter {adapter.digest} is not pinned")
            resident.pins -= 1

    def rows(self, adapter: AdapterRef) -> tuple[int, ...]:
        """Its pool rows. Raises KeyError unless the adapter is ready."""
        with self._lock:
            return self._ready(adapter).rows

    def free_rank(self) -> int:
        with self._lock:
            return self._rows.num_free + sum(
                len(resident.rows) for resident in self._resident.values() if _evictable(resident)
            )

    def is_away(self, adapter: AdapterRef) -> bool:
        with self._lock:
            failure = self._failures.get(adapter.digest)
            return (
                failure is not None
                and not failure.is_told
                and failure.until is not None
                and failure.until > self._clock()
            )

    def lacks_memory(self, adapter: AdapterRef) -> bool:
        with self._lock:
            if adapter.digest in self._resident:
                return False
            idle = sum(entry.extra for entry in self._resident.values() if _evictable(entry))
            return self._extra_bytes.get(adapter.digest, 0) > self._free_extra() + idle

    def resident(self) -> tuple[str, ...]:
        with self._lock:
            ready = [digest for digest, entry in self._resident.items() if entry.ready]
            return tuple(dict.fromkeys([*ready, *self._host.latest(MOST_TOLD)]))

    def counts(self) -> AdapterCounts:
        with self._lock:
            return self._counts

    def _ready(self, adapter: AdapterRef) -> _Resident:
        resident = self._resident[adapter.digest]
        if not resident.ready:
            raise KeyError(adapter.digest)
        return resident

    def _raise_failure(self, adapter: AdapterRef) -> None:
        if adapter.rank > self._rows.total:
            message = f"rank {adapter.rank} is larger than this worker's {self._rows.total} rows"
            raise AdapterLoadError("adapter_invalid", message)
        failure = self._failures.get(adapter.digest)
        if failure is None:
            return
        if failure.until is not None and failure.until <= self._clock():
            del self._failures[adapter.digest]
            return
        if not failure.is_told:
            return
        raise AdapterLoadError(failure.code, failure.message)

    def _make_room(self, rank: int, extra: int) -> bool:
        """Evict until `rank` rows and `extra` bytes are free; nothing if they can't be."""
        idle = [digest for digest, entry in self._resident.items() if _evictable(entry)]
        reachable = sum(len(self._resident[digest].rows) for digest in idle)
        bytes_reachable = sum(self._resident[digest].extra for digest in idle)
        if self._rows.num_free + reachable < rank or self._free_extra() + bytes_reachable < extra:
            return False
        for digest in idle:
            if self._rows.num_free >= rank and self._free_extra() >= extra:
                break
            self._drop(digest)
            self._counts = replace(self._counts, evictions=self._counts.evictions + 1)
        return True

    def _read_soon(self, adapter: AdapterRef) -> Future[LoadedAdapter]:
        """The lock is held."""
        read = self._reading.get(adapter.digest)
        if read is not None:
            return read
        held = self._host.get(adapter.digest)
        if held is not None:
            read = Future()
            read.set_result(held)
        else:
            read = self._reading[adapter.digest] = self._readers.submit(self._read, adapter)
        return read

    def _read(self, adapter: AdapterRef) -> LoadedAdapter:
        loaded = None
        try:
            loaded = in_passing(partial(self._source, adapter))
            if loaded.rank > adapter.rank:
                message = f"rank {loaded.rank}, registered with {adapter.rank}"
                raise AdapterLoadError("adapter_invalid", message)
            return loaded
        finally:
            with self._lock:
                del self._reading[adapter.digest]
                if loaded is not None and loaded.rank <= adapter.rank:
                    self._host.put(adapter.digest, loaded)

    def _write_soon(self, adapter: AdapterRef, read: Future[LoadedAdapter]) -> None:
        self._writer.submit(self._write, adapter, read)

    def _write(self, adapter: AdapterRef, read: Future[LoadedAdapter]) -> None:
        try:
            loaded = read.result()
            if self._reserve(adapter, self._pool.extra_bytes(loaded)):
                in_passing(partial(self._put, adapter, loaded))
                self._loaded(adapter, loaded)
        except AdapterLoadError as error:
            self._fail(adapter, error)
        except Exception as error:  # the thread's edge: an unknown fault fails this adapter only
            message = f"{type(error).__name__}: {error}"
            self._fail(adapter, AdapterLoadError("adapter_unavailable", message))
        self._on_change()

    def _put(self, adapter: AdapterRef, loaded: LoadedAdapter) -> None:
        rows = self._resident[adapter.digest].rows
        self._pool.write(rows, loaded)
        self._pool.probe(rows, loaded, again=adapter.digest in self._probed)
        self._probed[adapter.digest] = None

    def _loaded(self, adapter: AdapterRef, loaded: LoadedAdapter) -> None:
        with self._lock:
            resident = self._resident[adapter.digest]
            resident.invocation = loaded.invocation
            resident.ready = True
            self._away_since.pop(adapter.digest, None)
            self._counts = replace(self._counts, loads=self._counts.loads + 1)

    def _reserve(self, adapter: AdapterRef, extra: int) -> bool:
        """Take `extra` bytes. Where others hold them, forget the load: prepare comes again, and
        then knows the size. Raises AdapterLoadError for more than this worker has."""
        if extra > self._extra_memory:
            message = (
                f"it takes {extra} bytes besides its ranks (experts, heads, embeddings, saved "
                f"modules); this worker has {self._extra_memory} for that (--adapter-memory)"
            )
            raise AdapterLoadError("adapter_invalid", message)
        with self._lock:
            if extra:
                self._extra_bytes[adapter.digest] = extra
            if not self._make_room(0, extra):
                self._drop(adapter.digest)
                return False
            self._resident[adapter.digest].extra = extra
            return True

    def _drop(self, digest: str) -> None:
        resident = self._resident.pop(digest)
        self._pool.release(resident.rows)
        self._rows.give_back(resident.rows)

    def _free_extra(self) -> int:
        return self._extra_memory - sum(entry.extra for entry in self._resident.values())

    def _fail(self, adapter: AdapterRef, error: AdapterLoadError) -> None:
        retried = error.code != "adapter_invalid"
        now = self._clock()
        with self._lock:
            waits = self._keeps_waiting(adapter, error, now)
            if not waits:
                self._away_since.pop(adapter.digest, None)
            pause = self._away_seconds if waits else self._retry_after
            self._failures[adapter.digest] = _Failure(
                error.code, str(error), now + pause if retried else None, is_told=not waits
            )
            self._counts = replace(self._counts, failures=self._counts.failures + 1)
            self._drop(adapter.digest)
            if not retried:
                self._host.drop(adapter.digest)

    def _keeps_waiting(self, adapter: AdapterRef, error: AdapterLoadError, now: float) -> bool:
        if error.code != "store_unavailable":
            return False
        return now - self._away_since.setdefault(adapter.digest, now) < self._patience


def _evictable(resident: _Resident) -> bool:
    return resident.ready and not resident.pins
