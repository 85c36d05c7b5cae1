"""`python -m worker verify`: PEFT itself judges an adapter in our engine."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tests.engine.driver import save_tiny_model
from tests.engine.peft_adapters import save_adapter
from worker.__main__ import main
from worker.protocol.peft_config import PeftConfig
from worker.runtime import verify as command


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_model(tmp_path_factory.mktemp("model"), "qwen2")
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(96)}, unk_token="w5"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    modules = ["q_proj", "down_proj", "lm_head"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT tells that it saves the head's weight too
        return save_adapter(model, folder, r=4, target_modules=modules, use_dora=True)


def verify(adapter: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["verify", str(adapter), "--tokens", "5", *arguments])


def test_an_adapter_that_is_served_as_peft_does(model: Path, adapter: Path) -> None:
    said = verify(adapter, "--prompt", "w7 w8 w9", "--prompt", "w3")
    assert said.exit_code == 0, said.output
    *_, first, second, verdict = said.output.splitlines()
    assert "5/5" in first
    assert "w7 w8 w9" in first
    assert "5/5" in second
    assert verdict.startswith("equal to PEFT: largest relative error ")


def test_wrong_numbers_are_a_mismatch(
    model: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = PeftConfig.scale
    monkeypatch.setattr(PeftConfig, "scale", lambda config, module: right(config, module) * 1.01)
    said = verify(adapter, "--model", str(model))
    assert said.exit_code == 1
    assert "NOT equal to PEFT" in said.output


def test_an_adapter_that_we_refuse(model: Path, adapter: Path, tmp_path: Path) -> None:
    folder = tmp_path / "refused"
    folder.mkdir()
    for file in adapter.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"r": 5}))
    said = verify(folder, "--model", str(model))
    assert said.exit_code == 1
    assert "rank 4 in the file, 5 in the config" in said.output


def test_what_is_missing_is_named(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "give --model" in verify_without_base(adapter).output
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "peft" else object())
    said = verify(adapter)
    assert said.exit_code == 1
    assert "peft is not installed" in said.output
    assert "pip install peft==" in said.output


def verify_without_base(adapter: Path) -> Result:
    config = json.loads((adapter / "adapter_config.json").read_text())
    nameless = adapter.parent / "nameless"
    nameless.mkdir()
    (nameless / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": None})
    )
    return verify(nameless)
