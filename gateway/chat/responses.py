"""A response of server-sent events that ends its request when the client goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream(Response):
    """`first` and then `pieces`, each sent as it comes. A client that disconnects, or that has
    not read everything after `seconds`, is dropped; then `abandon` is called."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        pieces: AsyncGenerator[bytes],
        abandon: Callable[[], Awaitable[None]],
        seconds: float,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(headers={**_HEADERS, **headers})
        del self.headers["content-length"]
        self._first = first
        self._pieces = pieces
        self._abandon = abandon
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        gone = asyncio.create_task(disconnected(receive))
        complete = False
        try:
            await asyncio.wait(
                {sending, gone}, timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED
            )
            complete = sending.done()
            if not complete:
                raise ClientDisconnect
            sending.result()
        finally:
            for task in (sending, gone):
                task.cancel()
            await asyncio.wait({sending, gone})
            await self._pieces.aclose()
            if not complete:
                await self._abandon()

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
