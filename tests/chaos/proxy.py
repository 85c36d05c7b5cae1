"""A wire to Redis that can be cut, or that swallows everything for a while."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

_CHUNK = 65_536


class Proxy:
    """Listens on `port` in a thread of its own and forwards to `upstream`.

    `stall`: connections stay and accept bytes, nothing passes until `heal`; then what was held
    back goes on its way, late. `cut`: connections break and new ones are closed at once.
    """

    def __init__(self, upstream: int) -> None:
        self._upstream = upstream
        self._writers: set[asyncio.StreamWriter] = set()
        self._is_cut = False
        self._flowing = asyncio.Event()
        self._closed = asyncio.Event()
        started = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(started)), name="proxy", daemon=True
        )
        self._thread.start()
        started.wait()
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def stall(self) -> None:
        self._loop.call_soon_threadsafe(self._flowing.clear)

    def cut(self) -> None:
        self._loop.call_soon_threadsafe(self._break)

    def heal(self) -> None:
        self._loop.call_soon_threadsafe(self._mend)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._closed.set)
        self._thread.join()

    def _break(self) -> None:
        self._is_cut = True
        for writer in self._writers:
            writer.transport.abort()

    def _mend(self) -> None:
        self._is_cut = False
        self._flowing.set()

    async def _serve(self, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._flowing.set()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        await self._closed.wait()
        server.close()
        self._break()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        try:
            back, forth = await asyncio.open_connection("127.0.0.1", self._upstream)
        except OSError:  # Redis is down: what a client would see without us
            writer.transport.abort()
            return
        pumps = (self._pump(reader, forth), self._pump(back, writer))
        await asyncio.gather(*pumps)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with suppress(OSError):
            while data := await reader.read(_CHUNK):
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
        self._writers.discard(writer)
        writer.close()
