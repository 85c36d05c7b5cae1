"""How many threads a worker takes: never more than its container may use."""

import sys

import pytest

from worker import settings


@pytest.mark.parametrize(
    ("line", "cores"),
    [("max 100000", sys.maxsize), ("400000 100000", 4), ("250000 100000", 2), ("50000 100000", 1)],
)
def test_a_quota_counts_in_whole_cores(line, cores, tmp_path):
    (tmp_path / "cpu.max").write_text(line + "\n")
    assert settings.group_cores(tmp_path) == cores


def test_without_a_group_all_cores_count(tmp_path):
    assert settings.group_cores(tmp_path) == sys.maxsize


@pytest.mark.parametrize(
    ("quota", "physical", "logical"), [(sys.maxsize, 4, 8), (6, 4, 6), (3, 3, 3), (1, 1, 1)]
)
def test_the_least_of_quota_and_machine_is_taken(quota, physical, logical, monkeypatch):
    monkeypatch.setattr(settings, "group_cores", lambda: quota)
    monkeypatch.setattr(settings, "_allowed", lambda: range(8))
    monkeypatch.setattr(settings, "_siblings", lambda cpu: str(cpu % 4))
    assert settings.physical_cores() == physical
    assert settings.logical_cores() == logical
