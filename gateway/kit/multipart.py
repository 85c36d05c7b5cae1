"""multipart/form-data read as it arrives: a part's bytes are never held, only passed on.

Starlette's own form parser spools a whole upload to memory and disk before the endpoint runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from email.message import Message
from typing import TYPE_CHECKING

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from gateway.errors import BadRequest, PayloadTooLarge, UnsupportedMedia

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

FIELD_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class PartHead:
    """A form field, or a file when it has a filename (the last step of the path it names)."""

    name: str
    filename: str | None


class Multipart:
    """Parts one after another. A part that is not read is skipped.

        async for part in (form := Multipart(request)):
            chunks = form.chunks()      # or: text = await form.text()

    All methods raise BadRequest for a body that is malformed or ends early.
    """

    def __init__(self, request: Request) -> None:
        self._stream = request.stream()
        self._events: deque[PartHead | bytes | None] = deque()  # None ends a part
        self._ended = False
        self._in_part = False
        self._callbacks = _Callbacks(self._events)
        self._parser = MultipartParser(_boundary(request), self._callbacks.table())

    def __aiter__(self) -> Multipart:
        return self

    async def __anext__(self) -> PartHead:
        async for _ in self.chunks():
            pass
        event = await self._next()
        if event is None:
            raise StopAsyncIteration
        assert isinstance(event, PartHead)
        self._in_part = True
        return event

    async def chunks(self) -> AsyncIterator[bytes]:
        """The rest of the current part."""
        while self._in_part:
            event = await self._next()
            if event is None:
                self._in_part = False
                return
            assert isinstance(event, bytes)
            yield event

    async def text(self) -> str:
        """The current part as a short text. Raises PayloadTooLarge."""
        value = bytearray()
        async for chunk in self.chunks():
            value += chunk
            if len(value) > FIELD_BYTES:
                raise PayloadTooLarge(f"A form field is larger than {FIELD_BYTES} bytes.")
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise _malformed("a form field is not UTF-8") from None

    async def _next(self) -> PartHead | bytes | None:
        """The next event; None at the end of a part, or of the body when outside of one."""
        while not self._events:
            if self._ended:
                if not self._callbacks.complete:
                    raise _malformed("it ends early")
                return None
            await self._feed()
        return self._events.popleft()

    async def _feed(self) -> None:
        try:
            chunk = await anext(self._stream)
            if chunk:
                self._parser.write(chunk)
        except StopAsyncIteration:
            self._ended = True
        except FormParserError as error:
            raise _malformed(str(error)) from None


class _Callbacks:
    """What the parser calls, as events."""

    def __init__(self, events: deque[PartHead | bytes | None]) -> None:
        self._events = events
        self._headers = Message()
        self._field = bytearray()
        self._value = bytearray()
        self.complete = False

    def table(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._on_field,
            "on_header_value": self._on_value,
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers,
            "on_part_data": self._on_data,
            "on_part_end": self._on_part_end,
            "on_end": self._on_end,
        }

    def _begin(self) -> None:
        self._headers = Message()

    def _on_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        self._headers[self._field.decode("latin-1")] = self._value.decode("latin-1")
        self._field.clear()
        self._value.clear()

    def _on_headers(self) -> None:
        _, options = parse_options_header(self._headers.get("content-disposition", ""))
        if b"name" not in options:
            raise FormParserError("a part has no name")
        filename = options.get(b"filename")
        self._events.append(
            PartHead(
                _text(options[b"name"]),
                None if filename is None else _text(filename),
            )
        )

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        self._events.append(data[start:end])

    def _on_part_end(self) -> None:
        self._events.append(None)

    def _on_end(self) -> None:
        self.complete = True


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace").replace("\0", "")


def _boundary(request: Request) -> bytes:
    media, options = parse_options_header(request.headers.get("content-type", ""))
    if media != b"multipart/form-data":
        raise UnsupportedMedia("Send this as multipart/form-data.", code="unsupported_content_type")
    if not options.get(b"boundary"):
        raise _malformed("its Content-Type names no boundary")
    return options[b"boundary"]


def _malformed(why: str) -> BadRequest:
    return BadRequest(f"We could not parse the multipart body: {why}.", code="invalid_multipart")
