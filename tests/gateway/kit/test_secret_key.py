"""The deployment's own secret: given, or made once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pydantic import ValidationError

from gateway.kit.secret_key import FILE, load_secret_key
from gateway.settings import Settings


def test_a_key_is_made_once_for_all_processes_and_for_one_user(tmp_path: Path) -> None:
    settings = Settings(data=tmp_path)
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(load_secret_key, [settings] * 8))
    assert len(keys) == 1
    assert len(keys.pop()) == 64
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_a_given_key_is_taken_and_a_short_one_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATTEN_SECRET_KEY", "k" * 32)
    settings = Settings(data=tmp_path)
    assert load_secret_key(settings) == b"k" * 32
    assert "kkk" not in repr(settings)
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("BATTEN_SECRET_KEY", "k" * 31)
    with pytest.raises(ValidationError):
        Settings(data=tmp_path)
