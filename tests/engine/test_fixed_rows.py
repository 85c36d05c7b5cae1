"""With --deterministic a request's numbers are, bit for bit, those it has alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.paged_attention import cpu
from tests.engine.driver import prompts, save_tiny_model
from tests.engine.peft_adapters import save_adapter
from tests.engine.real_engine import RealEngine
from worker.engine.fixed_rows import ROWS, RowsNotFixed, fix_rows
from worker.engine.model_loader import load_model
from worker.protocol.types import AdapterRef, SamplingParams, TokenLogprob

if not cpu.is_available("cpu", torch.float32):
    pytest.skip("no C++ compiler, without which this mode is refused", allow_module_level=True)

Asked = tuple[list[int], SamplingParams, AdapterRef | None]
BATCHES: list[dict[str, Any]] = [
    {},
    {"token_budget": 13},
    {"token_budget": 300, "prefix_caching": False},
    {"longest": 150, "watermark": 1.0},
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    return save_tiny_model(tmp_path_factory.mktemp("base"), "llama", **sizes)


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[AdapterRef, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        AdapterRef(str(rank), rank): save_adapter(
            base, folder / str(rank), rank, r=rank, target_modules=["q_proj", "down_proj"]
        )
        for rank in (4, 7)
    }


def bits(engine: RealEngine, asked: Mapping[str, Asked]) -> dict[str, list[TokenLogprob]]:
    """Tokens and their exact log-probabilities, with the runners-up."""
    for name, (prompt, sampling, adapter) in asked.items():
        engine.add(name, prompt, sampling, adapter=adapter)
    finished = engine.run()
    return {name: list(finished[name].choices[0].logprobs or ()) for name in asked}


@pytest.fixture(scope="module")
def others(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[AdapterRef, Path]:
    """Adapters with products that are not the rank pool's."""
    folder = tmp_path_factory.mktemp("others")
    options: dict[str, dict[str, Any]] = {
        "head and embeddings": {"target_modules": ["q_proj", "lm_head", "embed_tokens"]},
        "saved": {"target_modules": ["q_proj"], "modules_to_save": ["down_proj", "lm_head"]},
        "rows of both": {
            "target_modules": ["v_proj"],
            "use_dora": True,
            "trainable_token_indices": {"embed_tokens": [5, 6, 7], "lm_head": [5, 9]},
        },
    }
    return {
        AdapterRef(name, 4): save_adapter(base, folder / name, r=4, **config)
        for name, config in options.items()
    }


def requests(adapters: Mapping[AdapterRef, Path]) -> dict[str, Asked]:
    refs = [None, *adapters]
    start, *others = prompts(4, longest=70)
    cases = [*others, *([*start, 7 + index] for index in range(5))]
    return {
        str(index): (
            prompt,
            SamplingParams(max_tokens=20, temperature=index % 2, seed=index, logprobs=3),
            refs[index % len(refs)],
        )
        for index, prompt in enumerate(cases)
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_the_batch(
    base: Path, adapters: dict[AdapterRef, Path], dtype: Any
) -> None:
    asked = requests(adapters)

    def engine(deterministic: bool = True, **config: Any) -> RealEngine:
        return RealEngine(
            base, adapters=adapters, dtype=dtype, deterministic=deterministic, **config
        )

    alone = {}
    for name, request in asked.items():
        alone |= bits(engine(), {name: request})
    for config in BATCHES:
        assert bits(engine(**config), asked) == alone, config
    if dtype == "float32":
        assert bits(engine(deterministic=False), asked) != alone, "it takes no effort here"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_bits_of_heads_embeddings_and_saved_modules_do_not_depend_on_the_batch(
    base: Path, others: dict[AdapterRef, Path]
) -> None:
    asked = requests(others)
    alone = {}
    for name, request in asked.items():
        alone |= bits(RealEngine(base, adapters=others, deterministic=True), {name: request})
    for config in BATCHES[1::2]:
        engine = RealEngine(base, adapters=others, deterministic=True, **config)
        assert bits(engine, asked) == alone, config


def test_rows_are_what_the_layer_gives_and_keep_their_shape() -> None:
    layer = torch.nn.Linear(8, 5)
    x = torch.randn(1, ROWS + 3, 8)
    want = layer(x)
    fix_rows(torch.nn.Sequential(layer))
    torch.testing.assert_close(layer(x), want)
    assert layer(x[:, :0]).shape == (1, 0, 5)


def test_fused_experts_are_refused_by_name(tmp_path: Path) -> None:
    model = load_model(save_tiny_model(tmp_path, "mixtral"), "float32", certified=True)
    with pytest.raises(RowsNotFixed, match=r"experts\.(gate_up|down)_proj multiplies outside"):
        fix_rows(model.packed.module)
