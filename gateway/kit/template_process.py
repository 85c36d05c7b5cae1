"""The process that renders adapters' own chat templates, from the side of its parent."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

import msgspec
import structlog

from gateway.kit.template_child import LENGTH, Order, Rendered, framed
from gateway.kit.templates import TemplateRefused

MODULE = "gateway.kit.template_child"
MEMORY = 512 * 2**20
MOST_CHARS = 8 * 2**20
START_SECONDS = 30.0
_NOTHING = Order("", {}, [])
_KEPT = ("PATH", "LANG", "LC_ALL", "TZ", "HOME")

_log = structlog.get_logger(__name__)


class TemplateProcess:
    """Renders one template at a time, each for at most `seconds`. Thread-safe; the process starts
    at first use, and again after it had to be ended. `close` it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        messages: Sequence[Mapping[str, Any]],
    ) -> str:
        """Blocks. Raises TemplateRefused."""
        order = Order(source, dict(special_tokens), [dict(message) for message in messages])
        with self._lock:
            try:
                if self._process is None:
                    self._process = _start(self._seconds)
                    self._ask(_NOTHING, START_SECONDS)
                answer = self._ask(order, self._seconds)
            except TimeoutError:
                self._end()
                raise TemplateRefused(f"it took longer than {self._seconds:g} s") from None
            except (OSError, EOFError):
                self._end()
                raise TemplateRefused("it ended the process that renders it") from None
        if answer.refused is not None:
            raise TemplateRefused(answer.refused)
        return answer.text

    def close(self) -> None:
        with self._lock:
            self._end()

    def _ask(self, order: Order, seconds: float) -> Rendered:
        """Raises TimeoutError, EOFError, OSError."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(framed(msgspec.msgpack.encode(order)))
        self._process.stdin.flush()
        until = time.monotonic() + seconds
        (length,) = LENGTH.unpack(self._read(LENGTH.size, until))
        return msgspec.msgpack.decode(self._read(length, until), type=Rendered)

    def _read(self, count: int, until: float) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        data = bytearray()
        file = self._process.stdout.fileno()
        while len(data) < count:
            ready, _, _ = select.select([file], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError
            chunk = os.read(file, min(count - len(data), 2**20))
            if not chunk:
                raise EOFError
            data += chunk
        return bytes(data)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError as error:  # what was written last cannot be flushed any more
                _log.debug("template_pipe_broken", error=str(error))
        process.wait()


def _start(seconds: float) -> subprocess.Popen[bytes]:
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-m", MODULE, str(MEMORY), str(MOST_CHARS), str(ceil(seconds))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )


class IsolatedTemplate:
    """As `ChatTemplate`, of an adapter: somebody else's."""

    def __init__(
        self, process: TemplateProcess, source: str, special_tokens: Mapping[str, str]
    ) -> None:
        self._process = process
        self._source = source
        self._special_tokens = special_tokens

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Blocks. Raises TemplateRefused."""
        return self._process.render(self._source, self._special_tokens, messages)
