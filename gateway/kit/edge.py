"""The outermost layer of the API: request ids, the request log, body checks, and the last
resort for unexpected errors. Pure ASGI, so that streams pass through untouched."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import structlog
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import ApiError, PayloadTooLarge, UnsupportedMedia
from gateway.kit.error_handlers import error_response, internal_error
from gateway.kit.ids import new_id
from gateway.kit.json import check_json
from gateway.kit.metrics import Metrics

_log = structlog.get_logger(__name__)
_CHARSETS = frozenset({"utf-8", "utf8", "us-ascii"})
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


class RequestEdge:
    """`uploads`: paths whose forms are left to stream. Other bodies have at most `body_bytes`."""

    def __init__(
        self, app: ASGIApp, body_bytes: int, metrics: Metrics, uploads: Collection[str] = ()
    ) -> None:
        self._app = app
        self._body_bytes = body_bytes
        self._metrics = metrics
        self._uploads = uploads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, send)
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=exchange.request_id)
        try:
            checked = await self._checked_body(scope, receive)
            await self._app(scope, checked, exchange.send)
        except ClientDisconnect:
            _log.info("client_disconnected")
        except ApiError as error:
            await error_response(error)(scope, receive, exchange.send)
        except Exception as error:  # the process edge
            _log.error("unexpected_error", exc_info=error)
            if exchange.status is not None:
                raise
            await internal_error()(scope, receive, exchange.send)
        finally:
            self._record(scope, exchange)

    async def _checked_body(self, scope: Scope, receive: Receive) -> Receive:
        """JSON bodies whole, bounded and strictly valid; uploads are left to stream."""
        headers = Headers(scope=scope)
        media, options = parse_options_header(headers.get("content-type", ""))
        charset = options.get(b"charset", b"utf-8").decode("latin-1").lower()
        path = scope["path"].rstrip("/")  # with a slash it is redirected
        is_upload = media == b"multipart/form-data" and path in self._uploads
        if scope["method"] not in _WITH_BODY or is_upload:
            return receive
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._body_bytes:
            raise self._too_large()
        body = await self._whole_body(receive)
        if body:
            if media != b"application/json" and not media.endswith(b"+json"):
                raise UnsupportedMedia(
                    f"Unsupported content type {media.decode('latin-1')!r}: send application/json "
                    "(multipart/form-data where files are uploaded).",
                    code="unsupported_content_type",
                )
            if charset not in _CHARSETS:
                raise UnsupportedMedia(
                    f"Unsupported charset {charset!r}: send JSON in UTF-8.",
                    code="unsupported_charset",
                )
            check_json(body)
        return _replay(body, receive)

    async def _whole_body(self, receive: Receive) -> bytes:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            body += message.get("body", b"")
            if len(body) > self._body_bytes:
                raise self._too_large()
            if not message.get("more_body", False):
                return bytes(body)

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(
            f"The request body is larger than {self._body_bytes} bytes.", code="body_too_large"
        )

    def _record(self, scope: Scope, exchange: _Exchange) -> None:
        route = getattr(scope.get("route"), "path", "unmatched")
        seconds = time.perf_counter() - exchange.started
        status = exchange.status or 499
        self._metrics.observe(scope["method"], route, status, seconds)
        _log.info(
            "request",
            method=scope["method"],
            path=scope["path"],
            status=status,
            seconds=round(seconds, 4),
        )


class _Exchange:
    """One response on its way out: stamps the id and what else `response_headers` of the
    request's state has, remembers the status."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._send = send
        self.request_id = new_id("req")
        self.started = time.perf_counter()
        self.status: int | None = None
        self._state = scope.setdefault("state", {})
        self._state["request_id"] = self.request_id

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self.request_id
            headers.update(self._state.get("response_headers", {}))
        await self._send(message)


def _replay(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def replayed() -> Any:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed
