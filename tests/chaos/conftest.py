from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.chaos.system import System


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """On SQLite."""
    system = System(tmp_path_factory.mktemp("chaos"), "sqlite")
    yield system
    system.close()


@pytest.fixture(scope="session")
def client(system: System) -> Iterator[OpenAI]:
    with system.connect() as client:
        yield client
