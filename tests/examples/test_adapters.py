"""The committed adapters, read without loading any model."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from tasks import TASKS

ADAPTERS = Path(__file__).parents[2] / "examples" / "adapters"
MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
FILES = {"README.md", "adapter_config.json", "adapter_model.safetensors"}
SHAPES = {
    "q_proj": (576, 576),
    "k_proj": (576, 192),
    "v_proj": (576, 192),
    "o_proj": (576, 576),
    "gate_proj": (576, 1536),
    "up_proj": (576, 1536),
    "down_proj": (1536, 576),
}
LAYERS = 30


@pytest.fixture(params=tuple(TASKS))
def folder(request: pytest.FixtureRequest) -> Path:
    return ADAPTERS / str(request.param)


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    return config


def header_of(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    return header


def test_folder_holds_nothing_else(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == FILES


def test_files_are_small(folder: Path) -> None:
    assert sum(path.stat().st_size for path in folder.iterdir()) < 6_000_000


def test_config_is_a_plain_lora(folder: Path) -> None:
    config = config_of(folder)
    assert config["peft_type"] == "LORA"
    assert config["base_model_name_or_path"] == MODEL_ID
    assert config["use_dora"] is False
    assert config["bias"] == "none"
    assert not config["rank_pattern"]
    assert not config["modules_to_save"]
    assert set(config["target_modules"]) <= set(SHAPES)


def test_tensors_are_bfloat16_and_fit_the_config(folder: Path) -> None:
    config = config_of(folder)
    header = header_of(folder / "adapter_model.safetensors")
    header.pop("__metadata__")
    assert {tensor["dtype"] for tensor in header.values()} == {"BF16"}
    assert len(header) == 2 * LAYERS * len(config["target_modules"])
    for name, tensor in header.items():
        *_, module, side, _ = name.split(".")
        inputs, outputs = SHAPES[module]
        rank = config["r"]
        assert tensor["shape"] == ([rank, inputs] if side == "lora_A" else [outputs, rank])


def test_adapters_differ_in_rank_and_one_is_rank_stabilised() -> None:
    configs = [config_of(ADAPTERS / name) for name in TASKS]
    assert len({config["r"] for config in configs}) == 3
    assert [config["use_rslora"] for config in configs].count(True) == 1


def test_scores_show_what_the_adapters_learnt() -> None:
    scores = json.loads((ADAPTERS / "scores.json").read_text())
    assert set(scores["tasks"]) == set(TASKS)
    for score in scores["tasks"].values():
        assert score["n"] >= 100
        assert score["base"] < 0.2
        assert score["adapter"] >= 0.8
