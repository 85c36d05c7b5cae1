"""Adapters that vanish from the store while requests run fail their own requests, and no others."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tests.engine.driver import hf_greedy, save_tiny_model
from tests.engine.peft_adapters import peft_model, save_adapter
from tests.engine.real_engine import Letters
from worker.adapters.folders import FolderSource
from worker.adapters.source import AdapterSource
from worker.adapters.store import AdapterStore
from worker.engine.adapter_cache import AdapterCache
from worker.engine.config import SchedulerConfig
from worker.engine.engine import Engine
from worker.engine.model_loader import load_model
from worker.engine.model_runner import ModelRunner
from worker.engine.outputs import FailedOutput, FinishedOutput
from worker.engine.rank_pool import RankPool
from worker.protocol.object_store import open_store
from worker.protocol.types import AdapterRef, RequestId, SamplingParams

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("base"))


def test_what_vanishes_fails_alone(base: Path, tmp_path: Path) -> None:
    """Twelve adapters in rotation over rows for three; every third one is deleted on the way."""
    bucket = tmp_path / "bucket"
    folders: dict[AdapterRef, Path] = {}
    for seed in range(12):
        made = save_adapter(base, tmp_path / f"a{seed}", seed, r=2, target_modules=["q_proj"])
        ref = FolderSource().add(made)
        folders[ref] = made
        shutil.copytree(made, bucket / "adapters" / ref.digest)
    model = load_model(base, "float32", certified=True)
    pool = RankPool(model.linears, 6, model.dtype, model.device, model.others)
    cache = tmp_path / "cache"
    store = AdapterStore(open_store(f"file://{bucket}"), cache, max_bytes=1)
    source = AdapterSource(store, model.lora_shapes)
    adapters = AdapterCache(pool, source, host_memory=1)
    config = SchedulerConfig(num_blocks=200, block_size=4, adapter_rank=6, context_tokens=256)
    runner = ModelRunner(model, 200, 4, adapters)
    engine = Engine(config, runner, adapters, Letters(), frozenset(), model.revision)
    gone = {ref for number, ref in enumerate(folders) if number % 3 == 2}
    prompt = list(range(3, 20))
    finished: dict[str, list[int]] = {}
    failed: dict[str, FailedOutput] = {}

    def run(wave: str) -> None:
        for number, ref in enumerate([*folders, None]):
            engine.add(RequestId(f"{wave}-{number}"), prompt, GREEDY, adapter=ref, stream=False)
        while engine.has_work():
            for output in engine.step():
                if isinstance(output, FinishedOutput):
                    finished[output.request_id] = list(output.choices[0].token_ids)
                elif isinstance(output, FailedOutput):
                    failed[output.request_id] = output
            if engine.stalled:
                time.sleep(0.001)  # loads go on in threads

    try:
        run("before")
        assert not failed
        for ref in gone:
            shutil.rmtree(bucket / "adapters" / ref.digest)
        for folder in cache.iterdir():
            shutil.rmtree(folder)
        run("after")
    finally:
        adapters.close()
    resident = {name for name in failed if name.startswith("after")}
    lost = {f"after-{number}" for number, ref in enumerate(folders) if ref in gone}
    assert resident <= lost
    assert resident, "those that were not on the device any more"
    for output in failed.values():
        assert (output.code, output.retryable) == ("adapter_unavailable", True)
        assert "is not in the object store" in output.message
    assert adapters.counts().evictions
    for number, ref in enumerate(folders):
        want = hf_greedy(peft_model(base, folders[ref]), prompt, 6)
        assert finished[f"before-{number}"] == want
        assert finished.get(f"after-{number}", want) == want
    assert finished["before-12"] == finished["after-12"]
