"""The object store of a deployment, opened alike by gateway and workers."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlparse

from obstore.store import LocalStore, ObjectStore, from_url

SECONDS = 30.0
RETRIES = 3


def open_store(url: str, seconds: float = SECONDS) -> ObjectStore:
    """`file:///folder`, made when it is not there, or `s3://bucket[/prefix]` with credentials,
    region and endpoint from the usual environment (AWS_*). A request that takes longer than
    `seconds` is tried again, RETRIES times at most and for no longer than `seconds` in all.

    Raises obstore's errors and OSError. Nothing is asked of a server yet.
    """
    if url.startswith("file://"):
        path = Path(urlparse(url).path)
        path.mkdir(parents=True, exist_ok=True)
        return LocalStore(path)
    return from_url(
        url,
        client_options={
            "timeout": timedelta(seconds=seconds),
            "connect_timeout": timedelta(seconds=min(seconds, 5.0)),
            "allow_http": _plain_endpoint(),
        },
        retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=seconds)},
    )


def _plain_endpoint() -> bool:
    """Whoever names an endpoint without TLS means it."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    return any(os.environ.get(name, "").startswith("http://") for name in names)


def reason(error: Exception) -> str:
    """An error of obstore in one line, without what it says for debugging."""
    return str(error).strip().partition("\n")[0]
