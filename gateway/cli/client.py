"""A small client of our own HTTP API, for commands that may run far from the server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import httpx

from gateway.cli.errors import CommandError, ServerRefused

PATIENCE_SECONDS = 60.0
_BUSY = frozenset({429, 502, 503, 504})


class Client:
    """Errors become one line. Reads are tried again for a while when a server that has answered
    before is away."""

    def __init__(
        self, base_url: str, key: str, transport: httpx.BaseTransport | None = None
    ) -> None:
        url = base_url.rstrip("/").removesuffix("/v1")
        self._http = httpx.Client(
            base_url=f"{url}/v1",
            headers={"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(60.0, write=300.0),
            transport=transport,
            event_hooks={"response": [self._hear]},
        )
        self._heard = False

    def close(self) -> None:
        self._http.close()

    def upload(self, path: Path, purpose: str) -> dict[str, Any]:
        with _opened(path) as file:
            return self._json(
                self._http.post(
                    "/files", data={"purpose": purpose}, files={"file": (path.name, file)}
                )
            )

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._json(self._http.post(path, json=body))

    def get(self, path: str) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                response = self._http.get(path)
            except httpx.TransportError:
                if not self._heard or time.monotonic() > deadline:
                    raise
            else:
                if response.status_code not in _BUSY or time.monotonic() > deadline:
                    return self._json(response)
            time.sleep(1.0)

    def download(self, path: str, target: BinaryIO) -> None:
        with self._http.stream("GET", path) as response:
            if response.is_error:
                response.read()
                self._json(response)
            for chunk in response.iter_bytes():
                target.write(chunk)

    def _hear(self, _response: httpx.Response) -> None:
        self._heard = True

    def _json(self, response: httpx.Response) -> dict[str, Any]:
        """Raises ServerRefused with what the server says."""
        if response.is_error:
            raise ServerRefused(f"{_what(response)} ({response.status_code})")
        body: dict[str, Any] = response.json()
        return body


def _what(response: httpx.Response) -> str:
    try:
        error = response.json()["error"]
        return f"{error['message']}" + (f" [{error['code']}]" if error.get("code") else "")
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.reason_phrase or 'with an error'}"


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}") from error
    with file:
        yield file
