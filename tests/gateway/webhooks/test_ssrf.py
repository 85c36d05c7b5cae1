"""Where a delivery may go: public addresses alone, looked up once, in the name of the host."""

from __future__ import annotations

import datetime
import ssl
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from gateway.errors import BadRequest
from gateway.settings import Settings
from gateway.webhooks.addresses import Address, is_public
from gateway.webhooks.sending import Sender
from gateway.webhooks.urls import check_url, origin
from tests.gateway.webhooks.conftest import TIMEOUT, Receiver

REFUSED = """
    0.0.0.0 0.1.2.3 10.0.0.1 10.255.255.255 100.64.0.1 100.127.255.254 127.0.0.1 127.1.2.3
    168.63.129.16 169.254.169.254 169.254.0.1 172.16.0.1 172.31.255.255 192.0.0.1 192.0.2.1
    192.88.99.1 192.168.1.1 198.18.0.1 198.19.255.255 198.51.100.7 203.0.113.9 224.0.0.1
    239.255.255.255 240.0.0.1 255.255.255.255 :: ::1 ::ffff:127.0.0.1 ::ffff:8.8.8.8
    ::ffff:169.254.169.254 ::127.0.0.1 ::8.8.8.8 64:ff9b::10.0.0.1 64:ff9b::127.0.0.1
    64:ff9b::169.254.169.254 64:ff9b:1::8.8.8.8 100::1 2001::1
    2001:0:4136:e378:8000:63bf:3fff:fdd2 2001:db8::1 2002:7f00:1:: 2002:808:808:: 3fff::1
    5f00::1 fc00::1 fd00:ec2::254 fe80::1 fec0::1 ff02::1 ff0e::1 4000::1
"""

PUBLIC = """
    1.1.1.1 8.8.8.8 93.184.216.34 100.63.255.255 100.128.0.1 128.0.0.1 168.63.129.15 172.15.0.1
    172.32.0.1 192.0.1.1 198.17.255.255 198.20.0.1 223.255.255.254 2606:4700:4700::1111
    2a00:1450:4001:80b::200e 2001:4860:4860::8888 64:ff9b::8.8.8.8
"""


@pytest.mark.parametrize("address", REFUSED.split())
def test_addresses_that_are_refused(address: str) -> None:
    assert not is_public(ip_address(address))


@pytest.mark.parametrize("address", PUBLIC.split())
def test_addresses_that_are_public(address: str) -> None:
    assert is_public(ip_address(address))


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/",
        "ftp://example.com/",
        "example.com/hook",
        "https://",
        "https:///path",
        "https://user:pw@example.com/",
        "https://user@example.com/",
        "https://example.com/#part",
        "https://example.com:0/",
        "https://example.com:99999/",
        "https://127.0.0.1/",
        "https://10.0.0.1:8443/",
        "https://[::1]/",
        "https://[::ffff:127.0.0.1]/",
        "https://[fd00::1]/",
        "https://169.254.169.254/latest/meta-data",
        "https://exa mple.com/",
        "https://example.com/\n",
        "https://example.com/" + "x" * 2048,
    ],
)
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(BadRequest) as refused:
        check_url(url, "url", allow_private=False)
    assert (refused.value.param, refused.value.code) == ("url", "invalid_value")


def test_urls_that_are_taken() -> None:
    for url in ("https://example.com", "https://example.com:8443/a?b=c", "https://8.8.8.8/"):
        assert check_url(url, "url", allow_private=False) == url
    for url in ("http://127.0.0.1:9/", "https://[::1]/", "http://localhost/hook"):
        assert check_url(url, "url", allow_private=True) == url
    assert origin("https://Example.com:443/a?b") == "https://example.com"
    assert origin("http://[::1]:80/") == origin("http://[::1]/")
    assert origin("https://example.com:8443/a") != origin("https://example.com/a")


class Names:
    """A resolver that answers in turn, and whose questions are counted."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, host: str, port: int) -> Sequence[Address]:
        self.asked.append((host, port))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return [ip_address(each) for each in answer]


class Wire(httpx.AsyncBaseTransport):
    """Keeps what would have been sent."""

    def __init__(self) -> None:
        self.requests: list[httpx.Request] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return httpx.Response(200, stream=httpx.ByteStream(b"ok"))


STRICT = Settings(webhook_timeout_seconds=TIMEOUT)


async def test_a_name_is_looked_up_once_and_its_address_called() -> None:
    names, wire = Names(["93.184.216.34"], ["127.0.0.1"]), Wire()
    sender = Sender(STRICT, names, wire)
    outcome = await sender.send("https://hooks.example.com/a?b=c", b"{}", {"webhook-id": "evt_1"})
    assert outcome.succeeded
    assert names.asked == [("hooks.example.com", 443)]
    [request] = wire.requests
    assert str(request.url) == "https://93.184.216.34/a?b=c"
    assert request.headers["host"] == "hooks.example.com"
    assert request.extensions["sni_hostname"] == "hooks.example.com"
    # The name has moved since: the next attempt looks it up again, and refuses.
    outcome = await sender.send("https://hooks.example.com/a?b=c", b"{}", {})
    assert (outcome.status_code, outcome.error) == (None, "address_not_allowed")
    assert len(wire.requests) == 1
    await sender.close()


@pytest.mark.parametrize(
    "answer",
    [["127.0.0.1"], ["8.8.8.8", "10.0.0.1"], ["::ffff:10.0.0.1"], ["64:ff9b::a00:1"], ["fe80::1"]],
)
async def test_a_name_with_any_address_that_is_not_public_is_not_called(answer: list[str]) -> None:
    wire = Wire()
    sender = Sender(STRICT, Names(answer), wire)
    outcome = await sender.send("https://hooks.example.com/", b"{}", {})
    assert (outcome.status_code, outcome.error) == (None, "address_not_allowed")
    assert wire.requests == []
    await sender.close()


@pytest.mark.parametrize(
    ("host", "error"),
    [
        ("127.0.0.1", "address_not_allowed"),
        ("localhost", "address_not_allowed"),
        ("127.1", "address_not_allowed"),
        ("2130706433", "address_not_allowed"),
        ("0x7f000001", "address_not_allowed"),
        ("0", "address_not_allowed"),
        ("[::1]", "address_not_allowed"),
        ("[::ffff:7f00:1]", "address_not_allowed"),
        ("nowhere.invalid", "name_not_resolved"),
        (f"{'x' * 64}.example.com", "name_not_resolved"),
    ],
)
async def test_the_real_resolver_leads_nowhere_private(host: str, error: str) -> None:
    wire = Wire()
    sender = Sender(STRICT, transport=wire)
    outcome = await sender.send(f"https://{host}/", b"{}", {})
    assert (outcome.status_code, outcome.error) == (None, error)
    assert wire.requests == []
    await sender.close()


async def test_no_error_leaves_an_attempt() -> None:
    """It would take the attempts at other receivers with it."""

    class Broken(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            raise RuntimeError("a library's bug")

    sender = Sender(STRICT, Names(["8.8.8.8"]), Broken())
    outcome = await sender.send("https://example.com/", b"", {})
    assert (outcome.status_code, outcome.error) == (None, "connection_lost")
    await sender.close()


async def test_plain_http_needs_the_operators_leave() -> None:
    wire = Wire()
    sender = Sender(STRICT, Names(["8.8.8.8"]), wire)
    assert (await sender.send("http://example.com/", b"", {})).error == "https_required"
    assert wire.requests == []
    await sender.close()


async def test_the_next_address_is_tried_when_one_refuses(receiver: Receiver) -> None:
    settings = Settings(webhook_allow_private=True, webhook_timeout_seconds=TIMEOUT)
    sender = Sender(settings, Names(["127.0.0.2", "127.0.0.1"]))
    outcome = await sender.send(f"http://hooks.test:{receiver.port}/ok", b"{}", {})
    assert outcome.succeeded
    assert receiver.received[0].headers["host"] == f"hooks.test:{receiver.port}"
    await sender.close()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """For hooks.test alone, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "hooks.test")])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("hooks.test")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path / "hooks.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + signed.public_bytes(serialization.Encoding.PEM)
    )
    return path


async def test_tls_is_checked_against_the_name_not_the_address(
    certificate: Path, serve_receiver: Any
) -> None:
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certificate)
    asked: list[str | None] = []
    server.sni_callback = lambda _socket, name, _context: asked.append(name)
    receiver = await serve_receiver(ssl=server)
    settings = Settings(webhook_allow_private=True, webhook_timeout_seconds=TIMEOUT)
    trusting = ssl.create_default_context(cafile=str(certificate))
    sender = Sender(settings, Names(["127.0.0.1"]), verify=trusting)
    outcome = await sender.send(f"https://hooks.test:{receiver.port}/ok", b"{}", {})
    assert outcome.succeeded, outcome
    assert asked == ["hooks.test"]
    assert receiver.received[0].headers["host"] == f"hooks.test:{receiver.port}"
    other = await sender.send(f"https://other.test:{receiver.port}/ok", b"{}", {})
    assert (other.status_code, other.error) == (None, "tls_failed")
    await sender.close()
    doubting = Sender(settings, Names(["127.0.0.1"]))
    unknown = await doubting.send(f"https://hooks.test:{receiver.port}/ok", b"{}", {})
    assert (unknown.status_code, unknown.error) == (None, "tls_failed")
    assert len(receiver.received) == 1
    await doubting.close()


@pytest.mark.parametrize(
    ("url", "can_be_allowed"),
    [("http://example.com/", True), ("https://127.0.0.1/", True), ("ftp://example.com/", False)],
)
def test_a_refusal_names_the_setting_that_lifts_it(url: str, can_be_allowed: bool) -> None:
    with pytest.raises(BadRequest) as refused:
        check_url(url, "url", allow_private=False)
    assert ("BATTEN_WEBHOOK_ALLOW_PRIVATE=1" in refused.value.message) == can_be_allowed
