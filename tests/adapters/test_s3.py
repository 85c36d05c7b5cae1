"""A worker's adapters from an S3-compatible server: downloads, digests, and a store that goes."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import obstore
import pytest

from tests.adapters.folders import SHAPES, tensors, write
from tests.s3 import S3Server
from worker.adapters import store as module
from worker.adapters.source import AdapterSource
from worker.adapters.store import AdapterStore
from worker.protocol import peft
from worker.protocol.errors import AdapterLoadError
from worker.protocol.object_store import open_store
from worker.protocol.types import AdapterRef

_buckets = itertools.count()


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch):
    """An empty bucket, behind a prefix."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    url = s3_server.make_bucket(f"adapters-{next(_buckets)}")
    return open_store(f"{url}/deep/prefix", seconds=2)


@pytest.fixture
def store(bucket, tmp_path: Path) -> AdapterStore:
    return AdapterStore(bucket, tmp_path / "cache")


def publish(bucket, tmp_path: Path, seed: int = 0) -> str:
    digest = write(tmp_path / f"adapter-{seed}", tensors(seed=seed))
    for file in (tmp_path / f"adapter-{seed}").iterdir():
        obstore.put(bucket, f"adapters/{digest}/{file.name}", file)
    return digest


def load_error(store: AdapterStore, digest: str) -> AdapterLoadError:
    with pytest.raises(AdapterLoadError) as error:
        store.fetch(digest)
    return error.value


def test_an_adapter_comes_in_chunks_and_is_checked(
    bucket, store: AdapterStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", 100)
    digest = publish(bucket, tmp_path)
    adapter = AdapterSource(store, SHAPES)(AdapterRef(digest, 4))
    assert adapter.rank == 4
    weights = (store.fetch(digest) / peft.WEIGHTS_FILE).read_bytes()
    assert weights == (tmp_path / "adapter-0" / peft.WEIGHTS_FILE).read_bytes()


def test_what_is_missing_or_changed_is_named(bucket, store: AdapterStore, tmp_path: Path) -> None:
    missing = load_error(store, "0" * 64)
    assert missing.code == "adapter_unavailable"
    assert str(missing) == f"adapters/{'0' * 64}/adapter_config.json is not in the object store"
    digest = publish(bucket, tmp_path)
    key = f"adapters/{digest}/{peft.WEIGHTS_FILE}"
    content = bytearray(obstore.get(bucket, key).bytes())
    content[-1] ^= 1
    obstore.put(bucket, key, bytes(content))
    changed = load_error(store, digest)
    assert changed.code == "adapter_invalid"
    assert f"not {digest}" in str(changed)
    obstore.delete(bucket, key)
    assert "is not in the object store" in str(load_error(store, digest))
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.fixture
def fragile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A server of this test alone."""
    server = S3Server()
    server.start()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.close()


def test_a_store_that_hangs_or_dies_is_given_up_and_found_again(
    fragile: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = open_store(fragile.make_bucket("fragile"), seconds=0.5)
    store = AdapterStore(bucket, tmp_path / "cache")
    known, other = publish(bucket, tmp_path, 0), publish(bucket, tmp_path, 1)
    store.fetch(known)
    for fail, heal in ((fragile.freeze, fragile.thaw), (fragile.stop, fragile.start)):
        fail()
        began = time.monotonic()
        error = load_error(store, other)
        assert time.monotonic() - began < 10
        assert error.code == "store_unavailable"
        assert str(error).startswith("the object store did not answer for adapters/")
        assert fragile.endpoint not in str(error)
        assert "was not asked again" in str(load_error(store, "0" * 64))
        assert store.fetch(known).is_dir(), "what was fetched before is on disk"
        heal()
        monkeypatch.setattr(store, "_away_until", 0.0)
    bucket = open_store(fragile.make_bucket("fragile"), seconds=2)
    publish(bucket, tmp_path, 1)
    assert store.fetch(other).is_dir()
