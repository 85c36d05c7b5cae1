"""From an object store to tensors: fetched once, checked, never half served."""

import os
import shutil

import pytest
import torch

from tests.adapters.folders import MODULES, SHAPES, tensors, write
from worker.adapters import store as store_module
from worker.adapters.folders import FolderSource
from worker.adapters.loader import load_adapter
from worker.adapters.source import AdapterSource
from worker.adapters.store import AdapterStore
from worker.protocol import peft
from worker.protocol.errors import AdapterLoadError
from worker.protocol.object_store import open_store
from worker.protocol.types import AdapterRef


@pytest.fixture
def bucket(tmp_path):
    folder = tmp_path / "bucket"
    folder.mkdir()
    return folder


def publish(bucket, weights=None, **fields):
    """Put an adapter into the store under its digest."""
    digest = write(bucket / "incoming", weights, **fields)
    target = bucket / "adapters" / digest
    target.parent.mkdir(exist_ok=True)
    (bucket / "incoming").rename(target)
    return digest


@pytest.fixture
def store(bucket, tmp_path):
    return AdapterStore(open_store(f"file://{bucket}"), tmp_path / "cache")


def spoil(folder):
    """Change the last value, as a disk might: neither the size nor the header shows it."""
    weights = folder / peft.WEIGHTS_FILE
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)


def lose(folder):
    (folder / peft.WEIGHTS_FILE).unlink()


def cut(name, length):
    """As a file that lost what was not yet on the disk."""

    def damage(folder):
        os.truncate(folder / name, length)

    return damage


def code(error):
    return error.value.code


def test_an_adapter_is_fetched_once(bucket, store):
    digest = publish(bucket)
    folder = store.fetch(digest)
    assert sorted(path.name for path in folder.iterdir()) == [peft.CONFIG_FILE, peft.WEIGHTS_FILE]
    shutil.rmtree(bucket / "adapters")
    assert store.fetch(digest) == folder


@pytest.mark.parametrize(
    "damage",
    [spoil, lose, cut(peft.WEIGHTS_FILE, 0), cut(peft.WEIGHTS_FILE, 99), cut(peft.CONFIG_FILE, 0)],
    ids=["spoilt", "lost", "empty", "cut", "no config"],
)
@pytest.mark.parametrize("restarted", [True, False])
def test_a_folder_that_was_damaged_on_disk_is_fetched_anew(
    bucket, store, tmp_path, damage, restarted
):
    digest = publish(bucket)
    damage(store.fetch(digest))
    if restarted:
        store = AdapterStore(open_store(f"file://{bucket}"), tmp_path / "cache")
    whole = (bucket / "adapters" / digest / peft.WEIGHTS_FILE).read_bytes()
    assert (store.fetch(digest) / peft.WEIGHTS_FILE).read_bytes() == whole
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [digest]


def test_a_folder_is_checked_once_in_each_process(bucket, tmp_path, monkeypatch):
    checked = []
    check = store_module._check
    monkeypatch.setattr(
        store_module,
        "_check",
        lambda folder, digest: [checked.append(digest), check(folder, digest)],
    )
    digest = publish(bucket)
    for processes in (1, 2):
        store = AdapterStore(open_store(f"file://{bucket}"), tmp_path / "cache")
        for _ in range(3):
            store.fetch(digest)
        assert checked == [digest] * processes


def test_a_folder_that_another_process_removes_is_fetched_anew(
    bucket, store, tmp_path, monkeypatch
):
    digest = publish(bucket)
    store.fetch(digest)
    check = store_module._check

    def trimmed(folder, digest):
        if folder.parent == tmp_path / "cache":
            shutil.rmtree(folder)
        check(folder, digest)

    monkeypatch.setattr(store_module, "_check", trimmed)
    other = AdapterStore(open_store(f"file://{bucket}"), tmp_path / "cache")
    assert peft.WEIGHTS_FILE in os.listdir(other.fetch(digest))


def test_a_damaged_folder_is_not_served_while_the_store_is_away(bucket, store):
    digest = publish(bucket)
    spoil(store.fetch(digest))
    shutil.rmtree(bucket / "adapters")
    with pytest.raises(AdapterLoadError) as error:
        store.fetch(digest)
    assert code(error) == "adapter_unavailable"


def test_a_users_folder_that_changes_after_its_first_use_is_refused(tmp_path):
    write(tmp_path / "mine")
    source = FolderSource()
    reference = source.add(tmp_path / "mine")
    load = source.for_model(SHAPES)
    assert load(reference).rank == 4
    spoil(tmp_path / "mine")
    with pytest.raises(AdapterLoadError, match="changed since it was first used") as error:
        load(reference)
    assert code(error) == "adapter_invalid"


def test_source_and_scale_reach_the_tensors(bucket, store):
    digest = publish(bucket, use_rslora=True)
    adapter = AdapterSource(store, SHAPES)(AdapterRef(digest, 4))
    assert adapter.rank == 4
    assert tuple(adapter.modules) == MODULES
    weights = adapter.modules[MODULES[0]]
    assert torch.equal(weights.A, tensors()[f"base_model.model.{MODULES[0]}.lora_A.weight"])
    assert weights.scale == 8 / 2
    assert adapter.nbytes == 4 * (4 * 12 + 16 * 4 + 4 * 12 + 8 * 4)


def test_a_missing_adapter_is_unavailable(store, tmp_path):
    with pytest.raises(AdapterLoadError) as error:
        store.fetch("0" * 64)
    assert code(error) == "adapter_unavailable"
    assert list((tmp_path / "cache").iterdir()) == []


def test_half_an_upload_is_unavailable_and_may_be_completed(bucket, store):
    digest = publish(bucket)
    weights = bucket / "adapters" / digest / peft.WEIGHTS_FILE
    aside = weights.rename(bucket / "aside")
    with pytest.raises(AdapterLoadError) as error:
        store.fetch(digest)
    assert code(error) == "adapter_unavailable"
    aside.rename(weights)
    assert store.fetch(digest).is_dir()


@pytest.mark.parametrize("change", ["flip", "truncate", "config"])
def test_changed_content_is_invalid(bucket, store, change):
    digest = publish(bucket)
    folder = bucket / "adapters" / digest
    weights = folder / peft.WEIGHTS_FILE
    data = bytearray(weights.read_bytes())
    if change == "flip":
        data[-1] ^= 1
    elif change == "truncate":
        del data[-1]
    else:
        text = (folder / peft.CONFIG_FILE).read_text()
        (folder / peft.CONFIG_FILE).write_text(text.replace('"lora_alpha": 8', '"lora_alpha": 9'))
    weights.write_bytes(data)
    with pytest.raises(AdapterLoadError) as error:
        store.fetch(digest)
    assert code(error) == "adapter_invalid"


def test_values_that_are_not_finite_are_invalid(bucket, store):
    weights = tensors()
    next(iter(weights.values()))[0, 0] = torch.nan
    with pytest.raises(AdapterLoadError, match="NaN") as error:
        store.fetch(publish(bucket, weights))
    assert code(error) == "adapter_invalid"


@pytest.mark.parametrize("name", ["", "../../etc", "A" * 64, "0" * 63])
def test_only_digests_are_names(store, name):
    with pytest.raises(AdapterLoadError, match="sha256"):
        store.fetch(name)


def test_the_disk_cache_is_bounded(bucket, tmp_path):
    digests = [publish(bucket, tensors(seed=seed)) for seed in range(3)]
    size = sum(file.stat().st_size for file in (bucket / "adapters" / digests[0]).iterdir())
    store = AdapterStore(open_store(f"file://{bucket}"), tmp_path / "cache", max_bytes=2 * size)
    first, second = (store.fetch(digest) for digest in digests[:2])
    os.utime(first, (2, 2))
    os.utime(second, (1, 1))
    third = store.fetch(digests[2])
    assert set((tmp_path / "cache").iterdir()) == {first, third}


@pytest.mark.parametrize(
    ("weights", "fields"),
    [
        (None, {"use_dora": True}),
        (None, {"r": 5}),
        ({}, {}),
        (
            {
                "base_model.model.other.lora_A.weight": torch.ones(4, 12),
                "base_model.model.other.lora_B.weight": torch.ones(16, 4),
            },
            {"target_modules": ["other"]},
        ),
    ],
)
def test_an_adapter_that_does_not_fit_is_never_loaded_in_part(tmp_path, weights, fields):
    folder = tmp_path / "adapter"
    if fields.get("use_dora"):
        write(folder)
        text = (folder / peft.CONFIG_FILE).read_text().replace("{", '{"use_dora": true, ', 1)
        (folder / peft.CONFIG_FILE).write_text(text)
    else:
        write(folder, weights, **fields)
    with pytest.raises(AdapterLoadError) as error:
        load_adapter(folder, SHAPES)
    assert code(error) == "adapter_invalid"


def test_a_pickle_is_never_opened(tmp_path):
    folder = tmp_path / "adapter"
    write(folder)
    torch.save(tensors(), folder / peft.WEIGHTS_FILE)
    with pytest.raises(AdapterLoadError, match="pickle") as error:
        load_adapter(folder, SHAPES)
    assert code(error) == "adapter_invalid"


def test_what_is_being_read_is_not_trimmed(bucket, tmp_path):
    digests = [publish(bucket, tensors(seed=seed)) for seed in range(2)]
    store = AdapterStore(open_store(f"file://{bucket}"), tmp_path / "cache", max_bytes=1)
    folders = [store.fetch(digest) for digest in digests]
    assert all(folder.is_dir() for folder in folders)
