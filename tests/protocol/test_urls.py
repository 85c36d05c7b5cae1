"""What is shown of a URL names no password, wherever it stands."""

from __future__ import annotations

import pytest

from worker.protocol.urls import masked


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://cache:6379/0", "redis://cache:6379/0"),
        ("redis://user:se@cret@cache/0", "redis://user:********@cache/0"),
        ("redis://cache/0?password=secret&db=1", "redis://cache/0?password=********&db=1"),
        (
            "unix:///run/redis.sock?db=1&password=secret",
            "unix:///run/redis.sock?db=1&password=********",
        ),
        (
            "postgresql://db/batten?user=a&password=s@cret",
            "postgresql://db/batten?user=a&password=********",
        ),
        ("rediss://cache/0?ssl_password=secret", "rediss://cache/0?ssl_password=********"),
        ("file:///data/store", "file:///data/store"),
        ("auto", "auto"),
    ],
)
def test_masked(url: str, shown: str) -> None:
    assert masked(url) == shown
