"""Rank rows, pins, eviction, host memory, and failures of loading."""

import gc
import threading
import weakref
from dataclasses import dataclass

import pytest
import torch

from worker.adapters.loader import ExtraTensors
from worker.engine import adapter_cache, remembered
from worker.engine.adapter_cache import MOST_TOLD, AdapterCache
from worker.engine.batch import AdapterLoadError
from worker.engine.lora import LoraLinear
from worker.engine.rank_pool import RankPool
from worker.engine.rank_rows import RankRows
from worker.protocol.types import AdapterRef


@dataclass
class Weights:
    A: torch.Tensor
    B: torch.Tensor
    scale: float = 2.0


@dataclass
class Adapter:
    modules: dict
    rank: int
    extras: dict
    nbytes: int = 100
    invocation: tuple = ()


class Source:
    """A store that counts, fails and blocks as it is told."""

    def __init__(self):
        self.loads = []
        self.errors = {}
        self.ranks = {}
        self.biased = set()
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, ref):
        assert self.gate.wait(10)
        self.loads.append(ref.digest)
        if ref.digest in self.errors:
            raise self.errors[ref.digest]
        rank = self.ranks.get(ref.digest, ref.rank)
        weights = Weights(torch.full((rank, 3), float(rank)), torch.ones(5, rank))
        extras = (
            {"first": ExtraTensors({"bias": torch.ones(5)})} if ref.digest in self.biased else {}
        )
        return Adapter({"first": weights}, rank, extras)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Fixture:
    def __init__(self, rank, **options):
        self.source = Source()
        self.clock = Clock()
        self.changed = threading.Semaphore(0)
        self.linears = {name: LoraLinear(torch.nn.Linear(3, 5)) for name in ("first", "second")}
        pool = RankPool(self.linears, rank, torch.float32, torch.device("cpu"))
        self.cache = AdapterCache(
            pool, self.source, on_change=self.changed.release, clock=self.clock, **options
        )

    def load(self, ref):
        assert self.cache.prepare(ref) is False
        assert self.changed.acquire(timeout=10)
        assert self.cache.prepare(ref) is True

    def fail(self, ref):
        assert self.cache.prepare(ref) is False
        assert self.changed.acquire(timeout=10)
        with pytest.raises(AdapterLoadError) as error:
            self.cache.prepare(ref)
        return error.value


@pytest.fixture
def make():
    made = []

    def factory(rank=8, **options):
        made.append(Fixture(rank, **options))
        return made[-1]

    yield factory
    for fixture in made:
        fixture.source.gate.set()
        fixture.cache.close()


A, B, C = AdapterRef("a", 4), AdapterRef("b", 3), AdapterRef("c", 2)


def test_an_adapter_is_ready_once_its_rows_are_written(make):
    f = make()
    f.source.gate.clear()
    assert f.cache.prepare(A) is False
    assert f.cache.prepare(A) is False
    with pytest.raises(KeyError):
        f.cache.rows(A)
    assert f.cache.free_rank() == 4
    assert f.cache.resident() == ()
    f.source.gate.set()
    assert f.changed.acquire(timeout=10)
    assert f.cache.prepare(A) is True
    assert f.source.loads == ["a"]
    first = f.linears["first"]
    rows = list(f.cache.rows(A))
    assert first.pool.A[rows].eq(4).all()
    assert first.pool.B[rows].eq(1).all()
    assert first.pool.scales[rows].eq(2).all()
    assert first.live_rows == set(rows)
    assert f.linears["second"].live_rows == set()
    assert f.cache.resident() == ("a",)


def test_the_least_recently_used_unpinned_adapter_goes(make):
    f = make(rank=7)
    f.load(A)
    f.load(B)
    f.cache.prepare(A)  # used after B
    assert f.cache.free_rank() == 7
    f.load(C)
    with pytest.raises(KeyError):
        f.cache.rows(B)
    assert set(f.cache.rows(A)).isdisjoint(f.cache.rows(C))


def test_pinned_adapters_stay_and_the_next_one_waits(make):
    f = make(rank=7)
    f.load(A)
    f.cache.pin(A)
    f.cache.pin(A)
    f.load(B)
    assert f.cache.free_rank() == 3
    big = AdapterRef("big", 5)
    assert f.cache.prepare(big) is False
    f.cache.rows(B)  # nothing was evicted for what could not fit anyway
    f.cache.unpin(A)
    assert f.cache.prepare(big) is False
    f.cache.unpin(A)
    f.load(big)
    assert "big" in f.cache.resident()


def test_an_evicted_adapter_comes_back_from_host_memory(make):
    f = make(rank=4)
    f.load(A)
    f.load(B)
    f.load(A)
    assert f.source.loads == ["a", "b"]
    assert set(f.cache.resident()) == {"a", "b"}


def test_host_memory_is_bounded(make):
    f = make(rank=4, host_memory=150)
    f.load(A)
    f.load(B)
    f.load(A)
    assert f.source.loads == ["a", "b", "a"]


def test_rows_of_another_rank_leave_nothing_behind(make):
    f = make(rank=4)
    f.load(A)
    narrow = AdapterRef("narrow", 4)
    f.source.ranks["narrow"] = 2
    f.load(narrow)
    first, rows = f.linears["first"], list(f.cache.rows(narrow))
    assert first.pool.A[rows[2:]].eq(0).all()
    assert first.pool.scales[rows[2:]].eq(0).all()
    assert first.live_rows == set(rows[:2])


def test_an_invalid_adapter_fails_for_good_and_frees_its_rows(make):
    f = make()
    f.source.errors["a"] = AdapterLoadError("adapter_invalid", "no such module")
    error = f.fail(A)
    assert (error.code, str(error)) == ("adapter_invalid", "no such module")
    f.clock.now = 1e9
    with pytest.raises(AdapterLoadError):
        f.cache.prepare(A)
    assert f.source.loads == ["a"]
    assert f.cache.free_rank() == 8


@pytest.mark.parametrize("wrong", [True, False])
def test_what_is_known_of_adapters_is_bounded(make, monkeypatch, wrong):
    """What was forgotten is found out again: a failure, what it takes, that it passed its probe."""
    monkeypatch.setattr(remembered, "MOST", 3)
    f = make()
    refs = [AdapterRef(f"{number}", 1) for number in range(6)]
    for ref in refs:
        f.source.biased.add(ref.digest)
        if wrong:
            f.source.errors[ref.digest] = AdapterLoadError("adapter_invalid", "broken")
    act = f.fail if wrong else f.load
    for ref in refs:
        act(ref)
    known = [value for value in vars(f.cache).values() if isinstance(value, remembered.Remembered)]
    assert max(map(len, known)) == 3
    loads = len(f.source.loads)
    if wrong:
        act(refs[0])
        with pytest.raises(AdapterLoadError, match="broken"):
            f.cache.prepare(refs[5])
        assert len(f.source.loads) == loads + 1


def test_an_adapter_that_is_not_remembered_is_probed_whole(make, monkeypatch):
    monkeypatch.setattr(remembered, "MOST", 2)
    probed, probe = [], RankPool.probe

    def noted(self, rows, adapter, *, again):
        probed.append(again)
        probe(self, rows, adapter, again=again)

    monkeypatch.setattr(RankPool, "probe", noted)
    f = make(rank=4)
    for digest in "abacab":  # each in the place of the one before
        f.load(AdapterRef(digest, 4))
    assert probed == [False, False, True, False, True, False]


def test_an_unavailable_adapter_may_be_tried_again_later(make):
    f = make(retry_after=30.0)
    f.source.errors["a"] = AdapterLoadError("adapter_unavailable", "store is down")
    assert f.fail(A).code == "adapter_unavailable"
    del f.source.errors["a"]
    f.clock.now = 29.0
    with pytest.raises(AdapterLoadError):
        f.cache.prepare(A)
    f.clock.now = 31.0
    f.load(A)


def test_who_waits_for_a_store_that_is_away_is_told_only_when_patience_ends(make):
    f = make(patience=100.0, away_seconds=5.0, retry_after=30.0)
    f.source.errors["a"] = AdapterLoadError("store_unavailable", "store is down")
    assert f.cache.prepare(A) is False
    assert f.changed.acquire(timeout=10)
    assert f.cache.is_away(A)
    assert f.cache.prepare(A) is False
    assert f.source.loads == ["a"]
    assert f.cache.free_rank() == 8
    f.load(B)
    f.clock.now = 6.0
    assert not f.cache.is_away(A)
    assert f.cache.prepare(A) is False
    assert f.changed.acquire(timeout=10)
    assert f.source.loads == ["a", "b", "a"]
    f.clock.now = 101.0
    assert f.fail(A).code == "store_unavailable"
    f.clock.now = 132.0
    del f.source.errors["a"]
    f.load(A)


def test_an_adapter_is_loaded_when_its_store_is_back(make):
    f = make(patience=100.0, away_seconds=5.0)
    f.source.errors["a"] = AdapterLoadError("store_unavailable", "store is down")
    assert f.cache.prepare(A) is False
    assert f.changed.acquire(timeout=10)
    del f.source.errors["a"]
    f.clock.now = 6.0
    f.load(A)


def test_an_unknown_fault_fails_its_adapter_only(make):
    f = make()
    f.source.errors["a"] = ZeroDivisionError("odd")
    error = f.fail(A)
    assert error.code == "adapter_unavailable"
    assert "ZeroDivisionError" in str(error)
    f.load(B)


@pytest.mark.parametrize("spared", [0, 1])
def test_an_adapter_is_loaded_once_there_can_be_threads_again(make, monkeypatch, spared):
    """`spared`: how many of those that a load takes can still be started."""
    started = []

    def in_passing(function):
        started.append(function)
        if spared < len(started) <= 2:
            raise RuntimeError("can't start new thread")
        return function()

    monkeypatch.setattr(adapter_cache, "in_passing", in_passing)
    f = make(retry_after=30.0)
    while len(started) < 2:
        assert "can't start new thread" in str(f.fail(A))
        assert f.cache.free_rank() == 8
        f.clock.now += 31.0
    f.load(A)


def test_nothing_keeps_the_weights_of_an_adapter_that_cannot_serve(make):
    f = make()
    made = []

    def source(ref):
        weights = Weights(torch.ones(ref.rank, 3), torch.full((5, ref.rank), torch.nan))
        made.append(weakref.ref(weights))
        return Adapter({"first": weights}, ref.rank, {})

    f.cache._source = source
    assert f.fail(A).code == "adapter_invalid"
    f.cache.close()
    gc.collect()
    assert [weights() for weights in made] == [None]


def test_a_rank_that_is_not_the_registered_one_is_invalid(make):
    f = make()
    f.source.ranks["c"] = 3
    assert f.fail(C).code == "adapter_invalid"


def test_an_adapter_larger_than_the_pool_is_refused_at_once(make):
    f = make(rank=3)
    with pytest.raises(AdapterLoadError, match="3 rows") as error:
        f.cache.prepare(A)
    assert error.value.code == "adapter_invalid"


def test_pins_are_counted_and_checked(make):
    f = make()
    with pytest.raises(KeyError):
        f.cache.pin(A)
    f.load(A)
    with pytest.raises(ValueError, match="not pinned"):
        f.cache.unpin(A)


def test_rows_come_from_the_smallest_gap_that_holds_them():
    rows = RankRows(10)
    taken = [rows.take(n) for n in (3, 2, 4)]
    assert taken == [(0, 1, 2), (3, 4), (5, 6, 7, 8)]
    rows.give_back(taken[0])
    assert rows.take(1) == (9,)
    assert rows.take(2) == (0, 1)
    rows.give_back(taken[2])
    assert rows.take(5) == (2, 5, 6, 7, 8)
    with pytest.raises(ValueError, match="of 0 free"):
        rows.take(1)
    with pytest.raises(ValueError, match="free already"):
        rows.give_back((1,)) or rows.give_back((1,))


def test_what_adapters_hold_besides_rows_is_bounded(make):
    f = make(extra_memory=30)  # one bias of 20 bytes
    f.source.biased = {"a", "b"}
    f.load(A)
    f.load(B)  # evicts a, whose rows alone would have left room
    assert f.cache.counts().evictions == 1
    f.cache.pin(B)
    assert f.cache.prepare(A) is False
    assert not f.changed.acquire(blocking=False)
    f.load(C)
    f.cache.unpin(B)
    f.load(A)


def test_an_adapter_that_was_too_large_beside_pinned_ones_loads_later(make):
    f = make(extra_memory=30)
    f.source.biased = {"a", "b"}
    f.load(B)
    f.cache.pin(B)
    assert f.cache.prepare(A) is False
    assert f.changed.acquire(timeout=10)  # its size is known now
    assert f.cache.prepare(A) is False
    f.cache.unpin(B)
    f.load(A)


def test_an_adapter_with_more_than_the_worker_has_is_invalid(make):
    f = make(extra_memory=10)
    f.source.biased = {"a"}
    assert f.fail(A).code == "adapter_invalid"
    assert f.cache.free_rank() == 8


def test_what_is_prefetched_is_read_before_there_are_rows():
    fixture = Fixture(4)
    first, second = AdapterRef("first", 4), AdapterRef("second", 4)
    fixture.load(first)
    fixture.cache.pin(first)
    fixture.cache.prefetch(second)
    fixture.cache.prefetch(second)
    while second.digest not in fixture.cache.resident():
        assert not fixture.cache.prepare(second), "no rows are free"
    fixture.cache.unpin(first)
    fixture.load(second)
    assert fixture.source.loads == ["first", "second"]


def test_a_prefetch_that_fails_is_told_by_prepare():
    fixture = Fixture(4)
    ref = AdapterRef("gone", 4)
    fixture.source.errors["gone"] = AdapterLoadError("adapter_unavailable", "not there")
    fixture.cache.prefetch(ref)
    assert fixture.cache.prepare(ref) is False
    assert fixture.changed.acquire(timeout=10)
    with pytest.raises(AdapterLoadError, match="not there"):
        fixture.cache.prepare(ref)


def test_an_adapter_that_is_long_in_coming_holds_up_no_other():
    fixture = Fixture(8)
    slow, quick = AdapterRef("slow", 4), AdapterRef("quick", 4)
    arrived, gate = threading.Event(), threading.Event()
    read = fixture.source.__call__

    def source(ref):
        if ref == slow:
            arrived.set()
            assert gate.wait(10)
        return read(ref)

    fixture.cache._source = source
    assert fixture.cache.prepare(slow) is False
    assert arrived.wait(10)
    fixture.load(quick)
    assert fixture.cache.prepare(slow) is False
    gate.set()
    assert fixture.changed.acquire(timeout=10)
    assert fixture.cache.prepare(slow) is True


def test_rows_of_modules_that_an_adapter_leaves_alone_are_zero():
    """Whatever lay in them before."""
    fixture = Fixture(4)
    wide, narrow = AdapterRef("wide", 4), AdapterRef("narrow", 4)
    fixture.source.ranks["narrow"] = 2
    fixture.load(wide)
    fixture.load(narrow)
    first, second = fixture.linears["first"], fixture.linears["second"]
    rows = list(fixture.cache.rows(narrow))
    assert first.pool.scales[rows].tolist() == [2.0, 2.0, 0.0, 0.0]
    assert not first.pool.A[rows[2:]].any()
    assert not second.pool.A.any()
    assert second.live_rows == frozenset()
    assert first.live_rows == frozenset(rows[:2])


def test_a_claim_names_only_the_last_of_many_adapters_in_host_memory():
    fixture = Fixture(4, host_memory=1 << 20)
    refs = [AdapterRef(f"a{number}", 4) for number in range(MOST_TOLD + 20)]
    for ref in refs:
        fixture.load(ref)
    named = fixture.cache.resident()
    assert named[0] == refs[-1].digest
    assert set(named) == {ref.digest for ref in refs[-MOST_TOLD:]}
