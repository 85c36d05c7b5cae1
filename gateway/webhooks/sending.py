"""One attempt at one delivery, over HTTP, to an address that was looked up and checked once."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from importlib.metadata import version
from ipaddress import ip_address
from typing import Literal, get_args

import httpx
import structlog

from gateway.kit.clock import now_ms
from gateway.settings import Settings
from gateway.webhooks.addresses import Address, is_public
from gateway.webhooks.urls import literal_address

MAX_ADDRESSES = 4
MAX_RESPONSE_BYTES = 64 * 1024
CONNECT_SECONDS = 5.0
_LOOKUPS = 256

Error = Literal[
    "timeout",
    "name_not_resolved",
    "address_not_allowed",
    "https_required",
    "connection_failed",
    "connection_lost",
    "tls_failed",
    "not_signed",
]
ERRORS: tuple[Error, ...] = get_args(Error)

Resolve = Callable[[str, int], Awaitable[Sequence[Address]]]

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The receiver's status, or why there is none. Of its answer nothing else is kept."""

    status_code: int | None = None
    error: Error | None = None
    retry_after_ms: int | None = None
    at: int = 0
    duration_ms: int = 0

    @property
    def succeeded(self) -> bool:
        return self.error is None and self.status_code is not None and self.status_code // 100 == 2

    @property
    def gone(self) -> bool:
        return self.status_code == 410


class _Unsendable(Exception):
    def __init__(self, error: Error) -> None:
        super().__init__(error)
        self.error = error


class Sender:
    """Close it in the event loop that used it."""

    def __init__(
        self,
        settings: Settings,
        resolve: Resolve | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        verify: ssl.SSLContext | None = None,
    ) -> None:
        self._settings = settings
        self._resolve = resolve or _lookup
        self._client = httpx.AsyncClient(
            transport=transport,
            verify=verify or _tls(),
            trust_env=False,  # a proxy would look names up again
            follow_redirects=False,
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            # A connection belongs to a name as well as to an address: none is used twice.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            headers={"user-agent": f"Batten-Webhooks/{version('batten')}", "accept": "*/*"},
        )

    async def send(self, url: str, body: bytes, headers: Mapping[str, str]) -> Outcome:
        """Never raises: whatever a receiver does is an outcome."""
        at, started = now_ms(), time.monotonic()
        status: int | None = None
        retry_after: int | None = None
        error: Error | None = None
        try:
            async with asyncio.timeout(self._settings.webhook_timeout_seconds):
                response = await self._open(httpx.URL(url), body, headers)
                try:
                    status = response.status_code
                    retry_after = _retry_after_ms(response.headers.get("retry-after"))
                    await _read_some(response)
                finally:
                    await response.aclose()
        except (TimeoutError, httpx.TimeoutException):
            error = "timeout"
        except _Unsendable as refusal:
            error = refusal.error
        except httpx.ConnectError as failure:
            error = "tls_failed" if _is_tls(failure) else "connection_failed"
        except Exception as failure:  # the edge of what receivers do
            _log.info("webhook_connection_lost", error=f"{type(failure).__name__}: {failure}")
            error = "connection_lost"
        duration = round((time.monotonic() - started) * 1000)
        return Outcome(status, error, retry_after, at, duration)

    async def close(self) -> None:
        await self._client.aclose()

    async def _open(
        self, url: httpx.URL, body: bytes, headers: Mapping[str, str]
    ) -> httpx.Response:
        """The first address that answers the connection."""
        addresses = await self._addresses(url)
        for address in addresses[:-1]:
            try:
                return await self._post(url, address, body, headers)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
        return await self._post(url, addresses[-1], body, headers)

    async def _addresses(self, url: httpx.URL) -> Sequence[Address]:
        """Of a name with any address that is not public, none is called. Raises _Unsendable."""
        private = self._settings.webhook_allow_private
        if url.scheme != "https" and not private:
            raise _Unsendable("https_required")
        host = url.raw_host.decode()
        literal = literal_address(host)
        try:
            port = url.port or (443 if url.scheme == "https" else 80)
            found = [literal] if literal else await self._resolve(host, port)
        except (OSError, UnicodeError):
            found = []
        if not found:
            raise _Unsendable("name_not_resolved")
        if not private and not all(is_public(address) for address in found):
            raise _Unsendable("address_not_allowed")
        return found[:MAX_ADDRESSES]

    async def _post(
        self, url: httpx.URL, address: Address, body: bytes, headers: Mapping[str, str]
    ) -> httpx.Response:
        """To the address, in the name of the host."""
        pinned = url.copy_with(host=str(address))
        name = url.raw_host.decode()
        request = self._client.build_request(
            "POST",
            pinned,
            content=body,
            headers={
                **headers,
                "host": url.netloc.decode(),
                "content-type": "application/json",
                "connection": "close",
            },
            extensions={"sni_hostname": name},
        )
        return await self._client.send(request, stream=True)


async def _read_some(response: httpx.Response) -> None:
    """A receiver may do its work while it answers: it is heard out, up to a limit."""
    read = 0
    async for chunk in response.aiter_raw():
        read += len(chunk)
        if read > MAX_RESPONSE_BYTES:
            return


def _retry_after_ms(header: str | None) -> int | None:
    """Seconds, or a date; what is neither asks for nothing."""
    if header is None:
        return None
    text = header.strip()
    if text.isascii() and text.isdecimal():
        return 1000 * (int(text) if len(text) < 7 else 10**6)
    try:
        date = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError):
        return None
    until = date if date.tzinfo else date.replace(tzinfo=UTC)
    return max(0, round((until - datetime.now(UTC)).total_seconds() * 1000))


def _is_tls(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return True
        error = error.__cause__ or error.__context__
    return False


@cache
def _tls() -> ssl.SSLContext:
    """Reading the certificates takes a while: once a process. SSL_CERT_FILE adds a company's."""
    return httpx.create_ssl_context()


@cache
def _threads() -> ThreadPoolExecutor:
    """Of look-ups alone: a name server that does not answer must hold up nothing else."""
    return ThreadPoolExecutor(_LOOKUPS, thread_name_prefix="webhook-lookup")


async def _lookup(host: str, port: int) -> Sequence[Address]:
    """Raises OSError, UnicodeError."""
    loop = asyncio.get_running_loop()
    found = await loop.run_in_executor(
        _threads(), lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    )
    addresses = dict.fromkeys(ip_address(str(entry[4][0]).partition("%")[0]) for entry in found)
    return [*addresses]
