"""An adapter that is broken, or would be served wrongly, never becomes ready."""

import threading

import pytest
import torch

from tests.engine.driver import save_tiny_model
from tests.engine.peft_adapters import save_adapter
from tests.engine.test_expert_lora import options
from tests.engine.test_peft_options import GPT2, OPTIONS
from worker.adapters.loader import ExtraTensors, LoadedAdapter, ModuleWeights, load_adapter
from worker.engine import rank_pool
from worker.engine.adapter_cache import AdapterCache
from worker.engine.batch import AdapterLoadError
from worker.engine.model_loader import load_model
from worker.engine.rank_pool import RankPool
from worker.protocol.types import AdapterRef

Q = "model.layers.0.self_attn.q_proj"
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = save_tiny_model(tmp_path_factory.mktemp("base"), "qwen2")
    return {name: load_model(folder, name, certified=True) for name in TYPES}


def outcome(model, adapter):
    """Load `adapter`; None when it became ready, else why it didn't."""
    ref = AdapterRef("x", adapter.rank)
    changed = threading.Semaphore(0)
    pool = RankPool(model.linears, 8, model.dtype, model.device, model.others)
    cache = AdapterCache(pool, lambda ref: adapter, on_change=changed.release)
    try:
        cache.prepare(ref)
        assert changed.acquire(timeout=60)
        assert cache.prepare(ref)
    except AdapterLoadError as error:
        assert cache.free_rank() == 8
        assert cache.resident() == ()
        with pytest.raises(KeyError):
            cache.rows(ref)
        return error
    finally:
        cache.close()
    return None


def linear(a=1.0, b=1.0, scale=2.0):
    weights = ModuleWeights(torch.full((4, 64), a), torch.full((64, 4), b), scale)
    return LoadedAdapter({Q: weights}, 4)


BROKEN = {
    "matches nothing": LoadedAdapter({}, 4),
    "not a number": linear(a=float("nan")),
    "overflows when scaled": linear(scale=3e38),
    "overflows in its product": linear(a=1e30, b=1e30),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", BROKEN)
def test_broken_numbers_are_refused(models, name, dtype):
    error = outcome(models[dtype], BROKEN[name])
    assert error is not None
    assert error.code == "adapter_invalid"
    assert Q in str(error) or name == "matches nothing"


def test_what_only_bfloat16_cannot_hold_is_refused_there(models):
    adapter = linear(a=1e-30, b=3.4e38)
    assert outcome(models["float32"], adapter) is None
    error = outcome(models["bfloat16"], adapter)
    assert error is not None
    assert "not finite in torch.bfloat16" in str(error)


@pytest.mark.parametrize("part", ["magnitude", "bias", "lora_bias"])
def test_extras_are_looked_at(models, part):
    weights = ModuleWeights(torch.ones(4, 64), torch.ones(64, 4), 1.0)
    for value, fine in [(1.0, True), (float("inf"), False)]:
        extras = {Q: ExtraTensors({part: torch.full((64,), value)})}
        error = outcome(models["float32"], LoadedAdapter({Q: weights}, 4, extras))
        assert (error is None) == fine


def test_dora_of_a_row_that_vanishes_is_refused(models):
    """B A = -W in the first output: PEFT, too, would divide by zero."""
    weight = models["float32"].linears[Q].base_layer.weight
    b = torch.zeros(64, 4)
    b[0, 0] = 1.0
    weights = ModuleWeights(torch.cat([-weight[:1], torch.zeros(3, 64)]), b, 1.0)
    extras = {Q: ExtraTensors({"magnitude": torch.ones(64)})}
    error = outcome(models["float32"], LoadedAdapter({Q: weights}, 4, extras))
    assert error is not None
    assert error.code == "adapter_invalid"


@pytest.mark.parametrize("spoil", ["A", "B", "scales"])
def test_rows_that_are_not_what_the_file_says_are_refused(models, spoil, monkeypatch):
    model = models["float32"]
    write = RankPool.write

    def spoilt(self, rows, adapter):
        write(self, rows, adapter)
        getattr(model.linears[Q].pool, spoil)[rows[1]] *= 1.5

    monkeypatch.setattr(RankPool, "write", spoilt)
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(4, 64, generator=generator), torch.randn(64, 4, generator=generator)
    error = outcome(model, LoadedAdapter({Q: ModuleWeights(a, b, 0.5)}, 4))
    assert error is not None
    assert "differs from its weights" in str(error)


class Reloads:
    """A cache of four rows, in which two adapters of four take each other's place."""

    def __init__(self, model, adapters):
        self.changed = threading.Semaphore(0)
        pool = RankPool(model.linears, 4, model.dtype, model.device, model.others)
        self.cache = AdapterCache(
            pool, lambda ref: adapters[ref.digest], on_change=self.changed.release
        )

    def load(self, name):
        ref = AdapterRef(name, 4)
        assert not self.cache.prepare(ref)
        assert self.changed.acquire(timeout=60)
        return self.cache.prepare(ref)


@pytest.fixture
def reloads(models):
    made = Reloads(models["float32"], {"x": linear(), "y": linear(a=0.5)})
    yield made
    made.cache.close()


def test_all_updates_are_looked_at_once(reloads, monkeypatch):
    probed = []
    real = rank_pool.probe_update
    monkeypatch.setattr(
        rank_pool,
        "probe_update",
        lambda *given: [probed.append(given[2].A[0, 0].item()), real(*given)][1],
    )
    for name in "xyxyx":
        assert reloads.load(name)
    assert probed == [1.0, 0.5]


def test_rows_are_looked_at_every_time(models, reloads, monkeypatch):
    """What rows hold depends on who had them before."""
    assert reloads.load("x")
    assert reloads.load("y")
    write = RankPool.write

    def spoilt(self, rows, adapter):
        write(self, rows, adapter)
        models["float32"].linears[Q].pool.A[rows[1]] *= 1.5

    monkeypatch.setattr(RankPool, "write", spoilt)
    with pytest.raises(AdapterLoadError, match="differs from its weights"):
        reloads.load("x")


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "qwen3_moe", "gpt_oss"])
def test_nothing_right_is_refused(kind, dtype, tmp_path):
    """Every kind of adapter, large and tiny, in the types that are served."""
    base = save_tiny_model(tmp_path / "base", kind)
    model = load_model(base, dtype, certified=True)
    router = "router" if kind == "gpt_oss" else "gate"
    configs = {"qwen2": OPTIONS, "gpt2": GPT2}.get(kind) or options(router)
    fan = {"fan_in_fan_out": True} if kind == "gpt2" else {}
    for name, config in configs.items():
        folder = save_adapter(base, tmp_path / name, **{"r": 4, **fan, **config})
        loaded = load_adapter(folder, model.lora_shapes)
        for factor in (1, 1e3, 1e-6, 1e-30):
            scaled = {
                module: ModuleWeights(weights.A * factor, weights.B, weights.scale)
                for module, weights in loaded.modules.items()
            }
            adapter = LoadedAdapter(scaled, loaded.rank, loaded.extras)
            assert outcome(model, adapter) is None, (name, factor)
