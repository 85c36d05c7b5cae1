"""How long a command waits for a server that does not answer."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest

from gateway.cli.client import Client

Outcome = httpx.Response | httpx.TransportError


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the client would have slept."""
    taken: list[float] = []
    monkeypatch.setattr(time, "sleep", taken.append)
    return taken


def client_of(*outcomes: Outcome) -> Client:
    """A client whose requests end as `outcomes` say, one after another."""
    left: Iterator[Outcome] = iter(outcomes)

    def end(_request: httpx.Request) -> httpx.Response:
        outcome = next(left)
        if isinstance(outcome, httpx.Response):
            return outcome
        raise outcome

    return Client("http://server", "key", httpx.MockTransport(end))


def answer(number: int, status: int = 200) -> httpx.Response:
    return httpx.Response(status, json={"number": number})


def test_a_server_that_has_never_answered_is_not_waited_for(pauses: list[float]) -> None:
    client = client_of(httpx.ConnectError("refused"))
    with pytest.raises(httpx.ConnectError):
        client.get("/batches/1")
    assert pauses == []


def test_a_read_outlasts_a_restart_of_the_server(pauses: list[float]) -> None:
    away = httpx.ConnectError("refused")
    client = client_of(answer(1), away, away, answer(0, 503), answer(2))
    assert client.get("/batches/1") == {"number": 1}
    assert client.get("/batches/1") == {"number": 2}
    assert len(pauses) == 3


def test_a_server_that_is_busy_from_the_start_is_waited_for(pauses: list[float]) -> None:
    assert client_of(answer(0, 503), answer(1)).get("/batches/1") == {"number": 1}
    assert len(pauses) == 1
