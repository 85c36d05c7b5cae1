"""The base model command, without a download."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import smollm2

SCRIPT = Path(smollm2.__file__)


def complete(folder: Path) -> Path:
    folder.mkdir()
    for name in smollm2.FILES:
        (folder / name).touch()
    return folder


def test_a_complete_folder_is_left_alone_without_torch(tmp_path: Path) -> None:
    folder = complete(tmp_path / "model")
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import smollm2; "
        f"status = smollm2.main([{str(folder)!r}]); "
        "sys.exit(status or int('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"model ready: {folder} (already there)\n"


def test_another_folder_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").touch()
    assert smollm2.main([str(tmp_path)]) == 1
    assert "not a complete model folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_failed_download_says_what_to_do(tmp_path: Path) -> None:
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, str(SCRIPT), str(tmp_path / "models" / "base")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "set BATTEN_MODEL" in done.stderr
    assert list((tmp_path / "models").iterdir()) == []


def test_an_install_that_lost_the_race_keeps_the_winner(tmp_path: Path) -> None:
    winner = complete(tmp_path / "dest")
    loser = complete(tmp_path / "made")
    smollm2.install(loser, winner)
    assert smollm2.is_complete(winner)


def test_an_install_over_something_else_fails(tmp_path: Path) -> None:
    dest = tmp_path / "dest"
    dest.mkdir()
    (dest / "notes.txt").touch()
    with pytest.raises(OSError, match="dest"):
        smollm2.install(complete(tmp_path / "made"), dest)
