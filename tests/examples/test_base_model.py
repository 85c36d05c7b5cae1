"""Where training and evaluation find their model, and what they say where there is none."""

from pathlib import Path

import base_model
import pytest


@pytest.fixture(autouse=True)
def nothing_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATTEN_MODEL", raising=False)


def test_the_folder_given_comes_before_the_one_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("given", "named"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    monkeypatch.setenv("BATTEN_MODEL", str(tmp_path / "named"))
    assert base_model.model_folder(None) == tmp_path / "named"
    assert base_model.model_folder(tmp_path / "given") == tmp_path / "given"


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"no model at {tmp_path}: name its folder with --model"):
        base_model.model_folder(tmp_path)


def test_where_nothing_is_named_the_command_that_makes_a_model_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_model, "CACHED_MODEL", tmp_path)
    with pytest.raises(SystemExit, match=f"run: python examples/smollm2.py {tmp_path}"):
        base_model.model_folder(None)
