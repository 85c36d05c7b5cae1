"""URLs of receivers. The parser that checks one is the one that calls it."""

from __future__ import annotations

import re
from ipaddress import ip_address

import httpx

from gateway.errors import BadRequest
from gateway.webhooks.addresses import Address, is_public

MAX_CHARS = 2048
_NAME = re.compile(r"[a-z0-9._-]+")
_UNLESS = (
    " (for development an operator can allow http:// and private addresses with "
    "BATTEN_WEBHOOK_ALLOW_PRIVATE=1)"
)


def check_url(url: str, param: str, allow_private: bool) -> str:
    """The URL as given. Names are looked up when something is sent. Raises BadRequest."""
    if problem := _problem(url, allow_private):
        raise BadRequest(
            f"Invalid value for '{param}': {problem}.", code="invalid_value", param=param
        )
    return url


def origin(url: str) -> str:
    """Scheme, host and port."""
    parsed = httpx.URL(url)
    return f"{parsed.scheme}://{parsed.netloc.decode()}"


def literal_address(host: str) -> Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


def _problem(url: str, allow_private: bool) -> str | None:
    if len(url) > MAX_CHARS:
        return f"a URL has at most {MAX_CHARS} characters"
    try:
        parsed = httpx.URL(url)
        host = parsed.raw_host.decode()
    except (httpx.InvalidURL, UnicodeError, ValueError):
        return "this is not a URL"
    if parsed.scheme != "https" and not (allow_private and parsed.scheme == "http"):
        return f"a URL must begin with https://{_UNLESS if parsed.scheme == 'http' else ''}"
    address = literal_address(host)
    if address is None and not _NAME.fullmatch(host):
        return "the URL names no host"
    if parsed.port is not None and not 0 < parsed.port < 65536:
        return "the URL's port is not one"
    if parsed.userinfo:
        return "a URL must not hold a user name or password"
    if parsed.fragment:
        return "a URL must not have a fragment"
    if address is not None and not allow_private and not is_public(address):
        return f"the address is not a public one{_UNLESS}"
    return None
